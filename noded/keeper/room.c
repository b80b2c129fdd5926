/* Reads of what the host allows (room.h). Keeper's thread; small reads of proc and cgroupfs. */
#include "keeper/room.h"

#include <inttypes.h>
#include <sys/statvfs.h>

#define HOST_PIDS 512 /* of everything else on the host */
#define DISK_KEPT_FREE (INT64_C(8) << 20)
#define MIB (INT64_C(1) << 20)

uint32_t room_pids(const struct cgroups *c)
{
	uint32_t all = cgroups_pids(c);

	return all > HOST_PIDS ? all - HOST_PIDS : 0;
}

int room_on_disk(const char *dir, int64_t bytes, struct err *e)
{
	struct statvfs st;
	int64_t left;

	if (statvfs(dir, &st) != 0)
		return err_set_errno(e, "look at the file system of %s", dir);
	left = (int64_t)(st.f_bavail * st.f_frsize);
	if (left >= bytes + DISK_KEPT_FREE)
		return 0;
	return err_set(e, ERR_CONFLICT, "%" PRId64 " MiB are free on the disk of %s, %" PRId64 " MiB are needed: make room there",
			left / MIB, dir, (bytes + DISK_KEPT_FREE) / MIB);
}
