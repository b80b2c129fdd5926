/* Codecs of the messages between noded's roles that have more than a field or two (role.h). Pure. */
#include "role.h"

#include "common/wire.h"

#include <stdlib.h>
#include <string.h>

void role_link_init_encode(const struct role_link_init *m, struct buf *out)
{
	wire_put_str(out, m->node_id);
	wire_put_str(out, m->join_token);
	wire_put_str(out, m->addresses);
	wire_put_str(out, m->ca_pem);
	wire_put_raw(out, m->sign_secret, sizeof(m->sign_secret));
	wire_put_raw(out, m->seal_public, sizeof(m->seal_public));
	wire_put_raw(out, m->receipt_public, sizeof(m->receipt_public));
	wire_put_raw(out, m->seal_sig, sizeof(m->seal_sig));
	wire_put_raw(out, m->receipt_sig, sizeof(m->receipt_sig));
	wire_put_str(out, m->name);
	wire_put_str(out, m->isolation);
	wire_put_str(out, m->labels);
	wire_put_u64(out, m->epoch);
	wire_put_u32(out, m->poll_ms);
}

int role_link_init_decode(const void *p, size_t n, struct role_link_init *out, struct err *e)
{
	struct wire_reader r;

	wire_read_init(&r, p, n);
	wire_str_fixed(&r, out->node_id, sizeof(out->node_id));
	wire_str_fixed(&r, out->join_token, sizeof(out->join_token));
	wire_str_fixed(&r, out->addresses, sizeof(out->addresses));
	wire_str_fixed(&r, out->ca_pem, sizeof(out->ca_pem));
	wire_raw(&r, out->sign_secret, sizeof(out->sign_secret));
	wire_raw(&r, out->seal_public, sizeof(out->seal_public));
	wire_raw(&r, out->receipt_public, sizeof(out->receipt_public));
	wire_raw(&r, out->seal_sig, sizeof(out->seal_sig));
	wire_raw(&r, out->receipt_sig, sizeof(out->receipt_sig));
	wire_str_fixed(&r, out->name, sizeof(out->name));
	wire_str_fixed(&r, out->isolation, sizeof(out->isolation));
	wire_str_fixed(&r, out->labels, sizeof(out->labels));
	out->epoch = wire_u64(&r);
	out->poll_ms = wire_u32(&r);
	return wire_end(&r, "link init", e);
}

void role_host_encode(const struct role_host *m, struct buf *out)
{
	wire_put_str(out, m->vmm);
	wire_put_str(out, m->image);
	wire_put_str(out, m->isolation);
	wire_put_str(out, m->jail);
}

int role_host_decode(const void *p, size_t n, struct role_host *out, struct err *e)
{
	struct wire_reader r;

	wire_read_init(&r, p, n);
	wire_str_fixed(&r, out->vmm, sizeof(out->vmm));
	wire_str_fixed(&r, out->image, sizeof(out->image));
	wire_str_fixed(&r, out->isolation, sizeof(out->isolation));
	wire_str_fixed(&r, out->jail, sizeof(out->jail));
	return wire_end(&r, "host", e);
}

void role_vm_encode(const struct role_vm *m, struct buf *out)
{
	wire_put_str(out, m->run_id);
	wire_put_raw(out, m->token, TOKEN_LEN);
	wire_put_u8(out, m->state);
	wire_put_u64(out, m->first_seq);
}

int role_vm_decode(const void *p, size_t n, struct role_vm *out, struct err *e)
{
	struct wire_reader r;

	wire_read_init(&r, p, n);
	wire_str_fixed(&r, out->run_id, sizeof(out->run_id));
	wire_raw(&r, out->token, TOKEN_LEN);
	out->state = wire_u8(&r);
	if (out->state < VM_STARTING || out->state > VM_ENDED)
		wire_fail(&r, "state");
	out->first_seq = wire_u64(&r);
	return wire_end(&r, "vm", e);
}

void role_broker_assign_encode(const struct role_broker_assign *m, struct buf *out)
{
	wire_put_bytes(out, m->assignment, m->assignment_len);
	wire_put_bytes(out, m->secrets, m->secrets_len);
	wire_put_i64(out, m->received_boot_ns);
	wire_put_i64(out, m->lease_deadline_boot_ns);
	wire_put_i64(out, m->boot_deadline_ms);
	wire_put_raw(out, m->image_hash, SHA256_LEN);
	wire_put_str(out, m->image);
	wire_put_str(out, m->vmm);
	wire_put_str(out, m->isolation);
	wire_put_str(out, m->jail);
	wire_put_str(out, m->start_mode);
}

int role_broker_assign_decode(const void *p, size_t n, struct role_broker_assign *out, struct err *e)
{
	struct wire_reader r;

	*out = (struct role_broker_assign){ .assignment_len = 0 };
	wire_read_init(&r, p, n);
	out->assignment = wire_bytes_copy(&r, ASSIGNMENT_MAX, &out->assignment_len);
	out->secrets = wire_bytes_copy(&r, 4096, &out->secrets_len);
	out->received_boot_ns = wire_i64(&r);
	out->lease_deadline_boot_ns = wire_i64(&r);
	out->boot_deadline_ms = wire_i64(&r);
	wire_raw(&r, out->image_hash, SHA256_LEN);
	wire_str_fixed(&r, out->image, sizeof(out->image));
	wire_str_fixed(&r, out->vmm, sizeof(out->vmm));
	wire_str_fixed(&r, out->isolation, sizeof(out->isolation));
	wire_str_fixed(&r, out->jail, sizeof(out->jail));
	wire_str_fixed(&r, out->start_mode, sizeof(out->start_mode));
	if (wire_end(&r, "broker assignment", e)) {
		role_broker_assign_free(out);
		return -1;
	}
	return 0;
}

void role_broker_assign_free(struct role_broker_assign *m)
{
	if (m->secrets)
		explicit_bzero(m->secrets, m->secrets_len);
	free(m->secrets);
	free(m->assignment);
	*m = (struct role_broker_assign){ .assignment_len = 0 };
}
