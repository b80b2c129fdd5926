/* Codecs of what keeper and an earlier keeper's broker say when they meet (adopt.h). Pure. */
#include "adopt.h"

#include "common/wire.h"

#include <string.h>

void role_identity_encode(const struct role_identity *m, struct buf *out)
{
	wire_put_u16(out, ADOPT_VERSION);
	wire_put_str(out, m->vm);
	wire_put_raw(out, m->nonce, sizeof(m->nonce));
}

int role_identity_decode(const void *p, size_t n, struct role_identity *out, struct err *e)
{
	struct wire_reader r;

	wire_read_init(&r, p, n);
	if (wire_u16(&r) != ADOPT_VERSION)
		wire_fail(&r, "version");
	wire_str_fixed(&r, out->vm, sizeof(out->vm));
	wire_raw(&r, out->nonce, sizeof(out->nonce));
	if (!r.failed && !id_valid("vm", out->vm))
		wire_fail(&r, "vm");
	return wire_end(&r, "identity", e);
}

void role_adopt_encode(const struct role_adopt *m, struct buf *out)
{
	wire_put_u16(out, m->version);
	wire_put_raw(out, m->nonce, sizeof(m->nonce));
	wire_put_i64(out, m->lease_deadline_boot_ns);
}

int role_adopt_decode(const void *p, size_t n, struct role_adopt *out, struct err *e)
{
	struct wire_reader r;

	*out = (struct role_adopt){ .version = 0 };
	wire_read_init(&r, p, n);
	out->version = wire_u16(&r);
	if (!r.failed && out->version != ADOPT_VERSION)
		return 0;
	wire_raw(&r, out->nonce, sizeof(out->nonce));
	out->lease_deadline_boot_ns = wire_i64(&r);
	if (out->lease_deadline_boot_ns < 0)
		wire_fail(&r, "lease");
	return wire_end(&r, "adopt", e);
}

void role_adopted_encode(const struct role_adopted *m, struct buf *out)
{
	wire_put_u16(out, m->version);
	wire_put_str(out, m->vm);
	wire_put_raw(out, m->token, sizeof(m->token));
	wire_put_u32(out, m->state);
	wire_put_i64(out, m->boot_ns);
	wire_put_i64(out, m->lease_deadline_boot_ns);
}

int role_adopted_decode(const void *p, size_t n, struct role_adopted *out, struct err *e)
{
	struct wire_reader r;

	*out = (struct role_adopted){ .version = 0 };
	wire_read_init(&r, p, n);
	out->version = wire_u16(&r);
	if (!r.failed && out->version != ADOPT_VERSION)
		return 0;
	wire_str_fixed(&r, out->vm, sizeof(out->vm));
	wire_raw(&r, out->token, sizeof(out->token));
	out->state = wire_u32(&r);
	out->boot_ns = wire_i64(&r);
	out->lease_deadline_boot_ns = wire_i64(&r);
	if (!r.failed && !id_valid("vm", out->vm))
		wire_fail(&r, "vm");
	if ((out->state & ~(uint32_t)ADOPTED_ALL) != 0)
		wire_fail(&r, "state");
	return wire_end(&r, "adopted", e);
}
