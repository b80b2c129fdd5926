/*
 * The connect filter of a VM's broker (jail/egress.h): nothing may be dialled before it has a run, then what the run's provider
 * needs. Keeper's thread; reads resolv.conf, a small file of the host's.
 */
#include "keeper/keeper_internal.h"

#include "common/text.h"

#include <fcntl.h>
#include <unistd.h>

#define RESOLV_CONF "/etc/resolv.conf"
#define RESOLV_CONF_MAX 16384

/* By its path: the group of a VM that was taken over has no descriptor. */
static int attach(struct vm *vm, const struct egress_rules *rules, struct err *e)
{
	int rc, fd = open(cgroup_dir(vm->proc[SLOT_BROKER].cgroup, 0), O_RDONLY | O_DIRECTORY | O_CLOEXEC);

	if (fd < 0)
		return err_set_errno(e, "cgroup of the broker");
	rc = egress_attach(vm->keeper->host.egress, fd, rules, e);
	close(fd);
	return rc;
}

int vm_egress_shut(struct vm *vm, struct err *e)
{
	static const struct egress_rules none = { .global = false };

	return vm->keeper->host.egress ? attach(vm, &none, e) : 0;
}

static int add_resolvers(struct egress_rules *rules, struct err *e)
{
	char text[RESOLV_CONF_MAX] = "";
	int fd = open(RESOLV_CONF, O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof(text) - 1);

	if (fd >= 0)
		close(fd);
	text[n > 0 ? n : 0] = '\0';
	return egress_add_resolvers(rules, text, e);
}

int vm_egress_open(struct vm *vm, struct err *e)
{
	struct egress_rules *rules;
	struct assignment a;
	int rc;

	if (!vm->keeper->host.egress)
		return 0;
	rules = calloc(1, sizeof(*rules));
	if (!rules)
		return err_set(e, ERR_NOMEM, "no memory");
	rules->global = true;
	if (assignment_decode(vm->assignment, vm->assignment_len, &a, e)) {
		free(rules);
		return -1;
	}
	rc = net_own_read(&rules->own, e) || add_resolvers(rules, e) ||
					     (a.model.any_address && egress_add_listed(rules, a.model.base_url, e)) ||
					     attach(vm, rules, e)
			     ? -1
			     : 0;
	assignment_free(&a);
	free(rules);
	return rc ? err_wrap(e, "connect filter") : 0;
}
