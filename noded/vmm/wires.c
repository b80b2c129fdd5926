/* Lists of descriptors for a VMM and its channel (wires.h). Never blocks. */
#include "vmm/wires.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

static int add(int *list, size_t *count, int fd)
{
	if (fd < 0)
		return -1;
	if (*count >= VMM_WIRES_MAX) {
		close(fd);
		errno = EMFILE;
		return -1;
	}
	list[(*count)++] = fd;
	return 0;
}

int vmm_wires_vmm(struct vmm_wires *w, int fd)
{
	return add(w->vmm, &w->vmm_count, fd);
}

int vmm_wires_channel(struct vmm_wires *w, int fd)
{
	return add(w->channel, &w->channel_count, fd);
}

int vmm_wires_pair(struct vmm_wires *w)
{
	int pair[2], rc;

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0)
		return -1;
	rc = vmm_wires_channel(w, pair[0]);
	return vmm_wires_vmm(w, pair[1]) == 0 ? rc : -1;
}

int vmm_wires_lend(struct vmm_wires *w, int fd)
{
	return vmm_wires_vmm(w, fcntl(fd, F_DUPFD_CLOEXEC, 3));
}

void vmm_wires_close(struct vmm_wires *w)
{
	for (size_t i = 0; i < w->vmm_count; i++)
		close(w->vmm[i]);
	for (size_t i = 0; i < w->channel_count; i++)
		close(w->channel[i]);
	*w = (struct vmm_wires){ .vmm_count = 0 };
}
