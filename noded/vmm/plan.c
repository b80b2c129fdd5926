/*
 * Codec of the plan that channel reads (plan.h), and the memfd around it. Called by keeper's drivers and by channel at its start;
 * does not block.
 */
#include "vmm/plan.h"

#include "common/wire.h"
#include "jail/sealed.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define PLAN_MAGIC UINT32_C(0x31505645) /* "EVP1" */
#define FD_NUMBERS 64                   /* above every descriptor that a VMM inherits */

void vmm_plan_encode(const struct vmm_plan *plan, struct buf *out)
{
	wire_put_u32(out, PLAN_MAGIC);
	wire_put_u8(out, plan->kind);
	wire_put_u8(out, plan->start);
	wire_put_u32(out, plan->memory_mib);
	wire_put_u32(out, plan->vcpus);
	wire_put_u32(out, (uint32_t)(plan->ram_fd + 1));
	wire_put_u32(out, (uint32_t)(plan->state_fd + 1));
	wire_put_u32(out, plan->answer_ms);
	wire_put_str(out, plan->version);
	wire_put_str(out, plan->create);
	wire_put_str(out, plan->snapshot);
}

int vmm_plan_decode(const void *p, size_t n, struct vmm_plan *out, struct err *e)
{
	struct wire_reader r;

	*out = (struct vmm_plan){ .ram_fd = -1, .state_fd = -1 };
	wire_read_init(&r, p, n);
	if (wire_u32(&r) != PLAN_MAGIC)
		wire_fail(&r, "magic");
	out->kind = wire_u8(&r);
	out->start = wire_u8(&r);
	out->memory_mib = wire_u32(&r);
	out->vcpus = wire_u32(&r);
	out->ram_fd = (int32_t)wire_count(&r, FD_NUMBERS) - 1;
	out->state_fd = (int32_t)wire_count(&r, FD_NUMBERS) - 1;
	out->answer_ms = wire_u32(&r);
	wire_str_fixed(&r, out->version, sizeof(out->version));
	out->create = wire_str(&r, VMM_PLAN_BODY_MAX);
	wire_str_fixed(&r, out->snapshot, sizeof(out->snapshot));
	if (!r.failed && (out->kind < VMM_QEMU || out->kind > VMM_CLOUD_HYPERVISOR))
		wire_fail(&r, "kind");
	if (!r.failed && (out->start < VMM_COLD || out->start > VMM_CLONE))
		wire_fail(&r, "start");
	if (wire_end(&r, "VMM plan", e)) {
		vmm_plan_free(out);
		return -1;
	}
	return 0;
}

void vmm_plan_free(struct vmm_plan *plan)
{
	free(plan->create);
	plan->create = NULL;
}

int vmm_plan_write(const struct vmm_plan *plan, struct err *e)
{
	struct buf b = BUF_INIT(VMM_PLAN_MAX);
	int fd;

	vmm_plan_encode(plan, &b);
	fd = sealed_file("plan", &b, e);
	buf_free(&b);
	return fd;
}

int vmm_plan_read(int fd, struct vmm_plan *out, struct err *e)
{
	struct stat st;
	uint8_t *bytes;
	size_t len;
	int rc = -1;

	if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode) || st.st_size <= 0 || st.st_size > VMM_PLAN_MAX)
		return err_set(e, ERR_INVALID, "descriptor %d is no VMM plan", fd);
	len = (size_t)st.st_size;
	bytes = malloc(len);
	if (!bytes)
		return err_set(e, ERR_NOMEM, "no memory");
	if (pread(fd, bytes, len, 0) != (ssize_t)len)
		err_set(e, ERR_IO, "descriptor %d cannot be read", fd);
	else
		rc = vmm_plan_decode(bytes, len, out, e);
	free(bytes);
	return rc;
}
