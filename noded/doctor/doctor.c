/*
 * The report of `noded doctor` (doctor.h): runs the checks of a start (keeper/host.h) one by one, then those that only an operator
 * asks for, and prints them as lines or as JSON. Main thread; blocks for up to some seconds for each controld that does not answer.
 */
#include "doctor/doctor_internal.h"

#include "common/buf.h"
#include "common/json.h"
#include "common/text.h"

#include <inttypes.h>
#include <signal.h>
#include <sodium.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const finding_names[] = { [FINDING_OK] = "ok", [FINDING_WARN] = "warn", [FINDING_FAIL] = "FAIL" };
static const char *const finding_json[] = { [FINDING_OK] = "ok", [FINDING_WARN] = "warn", [FINDING_FAIL] = "fail" };

/* Paths and versions are the host's own bytes: what a terminal could misread is escaped. */
static void keep_safe(char *out, size_t size, const char *text)
{
	struct buf b = BUF_INIT(8192);
	const char *safe = text_safe(&b, text, strlen(text), false) ? buf_cstr(&b) : NULL;

	if (!safe)
		safe = "?";
	(void)snprintf(out, size, "%s", safe);
	out[text_utf8_border(out, strlen(out))] = '\0';
	buf_free(&b);
}

void doctor_say(struct doctor *d, const char *name, enum finding finding, const char *mend, const char *fmt, ...)
{
	struct doctor_item *item;
	char text[1024];
	va_list ap;

	if (d->count == DOCTOR_ITEMS_MAX)
		return;
	item = &d->items[d->count++];
	item->name = name;
	item->finding = finding;
	va_start(ap, fmt);
	(void)vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	keep_safe(item->found, sizeof(item->found), text);
	keep_safe(item->mend, sizeof(item->mend), mend && finding != FINDING_OK ? mend : "");
}

/* --- the checks of a start -----------------------------------------------------------------------------------------------------
 */

static void say_isolation(struct doctor *d)
{
	const struct host *h = &d->host;

	if (h->vmm.kvm)
		doctor_say(d, "isolation", FINDING_OK, NULL, "kvm");
	else
		doctor_say(d, "isolation", FINDING_WARN,
				"run VMs on a host with KVM; organizations that ask for class kvm are not served here",
				"emulated: VMs are slow, and emulation is not sold as isolation");
}

/* What a good step has to say. */
static void say_good(struct doctor *d, const char *name)
{
	const struct host *h = &d->host;

	if (strcmp(name, "root") == 0)
		doctor_say(d, name, FINDING_OK, NULL, "started as root");
	else if (strcmp(name, "namespaces") == 0 && d->config->insecure_no_jail)
		doctor_say(d, name, FINDING_WARN, "set insecure_no_jail = false",
				"not used: insecure_no_jail is set, an escaped guest sees this host");
	else if (strcmp(name, "namespaces") == 0)
		doctor_say(d, name, FINDING_OK, NULL, "mount, net, ipc, uts, pid and cgroup namespaces can be made");
	else if (strcmp(name, "cgroups") == 0)
		doctor_say(d, name, FINDING_OK, NULL, "%s, writable", cgroups_text(h->cgroups));
	else if (strcmp(name, "filters") == 0)
		doctor_say(d, name, FINDING_OK, NULL,
				h->egress ? "of system calls, and of what a broker connects to" : "of system calls");
	else if (strcmp(name, "vmm") == 0)
		doctor_say(d, name, FINDING_OK, NULL, "%s, %s", h->vmm.version, h->binary);
	else if (strcmp(name, "isolation") == 0)
		say_isolation(d);
	else if (strcmp(name, "image") == 0 && h->image_name[0] == '\0')
		doctor_say(d, name, FINDING_WARN, "`ephemeral admin image add` and `use`: noded fetches it when it runs",
				"none yet, and no run is taken without%s%s", h->image_note[0] ? ": " : "", h->image_note);
	else if (strcmp(name, "image") == 0)
		doctor_say(d, name, FINDING_OK, NULL, "%.12s, intact", h->image_name);
	else if (strcmp(name, "memory") == 0)
		doctor_say(d, name, FINDING_OK, NULL, "%" PRIu32 " MiB for VMs, %" PRIu32 " CPUs",
				d->config->memory_mib > 0 ? (uint32_t)d->config->memory_mib : h->memory_mib, h->cpus);
	else
		doctor_say(d, name, FINDING_OK, NULL, "good");
}

static void look_at_host(struct doctor *d)
{
	for (size_t i = 0; i < host_step_count; i++) {
		struct err e = { .code = ERR_INTERNAL };

		if (host_steps[i].check(d->config, &d->host, &e))
			doctor_say(d, host_steps[i].name, FINDING_FAIL, host_steps[i].mend, "%s", e.text);
		else
			say_good(d, host_steps[i].name);
	}
}

/* --- the report ----------------------------------------------------------------------------------------------------------------
 */

static void count(const struct doctor *d, size_t out[3])
{
	memset(out, 0, 3 * sizeof(out[0]));
	for (size_t i = 0; i < d->count; i++)
		out[d->items[i].finding]++;
}

static void print_lines(const struct doctor *d)
{
	size_t n[3];

	for (size_t i = 0; i < d->count; i++) {
		const struct doctor_item *item = &d->items[i];

		printf("%-4s  %-11s %s\n", finding_names[item->finding], item->name, item->found);
		if (item->mend[0] != '\0')
			printf("      %-11s mend: %s\n", "", item->mend);
	}
	count(d, n);
	printf("%zu ok, %zu warnings, %zu failed\n", n[FINDING_OK], n[FINDING_WARN], n[FINDING_FAIL]);
}

static bool print_json(const struct doctor *d)
{
	struct buf b = BUF_INIT(1 << 20);
	struct jw w;
	const char *text;
	size_t n[3];

	count(d, n);
	jw_init(&w, &b);
	jw_object(&w);
	jw_kstr(&w, "version", EPHEMERAL_VERSION);
	jw_kbool(&w, "ok", n[FINDING_FAIL] == 0);
	jw_karray(&w, "items");
	for (size_t i = 0; i < d->count; i++) {
		const struct doctor_item *item = &d->items[i];

		jw_object(&w);
		jw_kstr(&w, "item", item->name);
		jw_kstr(&w, "state", finding_json[item->finding]);
		jw_kstr(&w, "found", item->found);
		jw_kstr(&w, "mend", item->mend[0] != '\0' ? item->mend : NULL);
		jw_close(&w);
	}
	jw_close(&w);
	jw_close(&w);
	text = jw_end(&w) ? buf_cstr(&b) : NULL;
	if (text)
		puts(text);
	buf_free(&b);
	return text != NULL;
}

static void look(struct doctor *d)
{
	doctor_say(d, "config", FINDING_OK, NULL, "good");
	host_init(d->config, &d->host);
	look_at_host(d);
	doctor_look_at_kernel(d);
	doctor_look_at_disk(d);
	doctor_look_at_control(d);
	host_close(&d->host);
}

int doctor_main(const struct noded_config *config, const struct err *why, bool json)
{
	struct doctor *d = calloc(1, sizeof(*d));
	bool printed = true;
	size_t n[3];

	if (!d || sodium_init() < 0) {
		free(d);
		fputs("noded: no memory\n", stderr);
		return 1;
	}
	signal(SIGPIPE, SIG_IGN);
	d->config = config;
	if (config)
		look(d);
	else
		doctor_say(d, "config", FINDING_FAIL, "correct the file or the --set; `noded help config` lists the keys", "%s",
				why->text);
	if (json)
		printed = print_json(d);
	else
		print_lines(d);
	count(d, n);
	free(d);
	return n[FINDING_FAIL] == 0 && printed ? 0 : 1;
}
