/*
 * controld's key table and the checks over more than one key. Called by main.c at start, by -t and at SIGHUP, on the main thread;
 * may block on the file. Owns nothing: the struct is the caller's.
 */
#include "config.h"

#include "../common/config.h"
#include "../common/price.h"
#include "../common/text.h"

#include <inttypes.h>
#include <stddef.h>

#define AT(field) offsetof(struct config, field)
#define PATH_BYTES 4000
#define DAY INT64_C(86400)

static const struct config_key config_keys[] = {
	{ .name = "database", .type = CONFIG_STRING, .offset = AT(database), .fallback = "dbname=ephemeral", .min = 1, .max = 2000, .secret = true,
	  .help = "Postgres as a libpq connection string, for example \"host=/run/postgresql dbname=ephemeral user=ephemeral\"" },
	{ .name = "listen", .type = CONFIG_STRING, .offset = AT(listen), .fallback = "127.0.0.1:8080", .min = 1, .max = 300,
	  .help = "address of the public API, host:port; port 0 = any free one" },
	{ .name = "operator_listen", .type = CONFIG_STRING, .offset = AT(operator_listen), .fallback = "127.0.0.1:8081", .min = 1, .max = 300,
	  .help = "address of the operator API (operator keys work only here), host:port" },
	{ .name = "link_listen", .type = CONFIG_STRING, .offset = AT(link_listen), .fallback = ":7443", .min = 1, .max = 300,
	  .help = "address that nodes dial, host:port, TLS" },
	{ .name = "scripted_listen", .type = CONFIG_STRING, .offset = AT(scripted_listen), .fallback = "", .max = 300,
	  .help = "address of the scripted model provider (a script, not a model), host:port; empty = off" },
	{ .name = "scripted_token_file", .type = CONFIG_STRING, .offset = AT(scripted_token_file), .optional = true, .max = PATH_BYTES,
	  .help = "file with the bearer token of the scripted provider; needed with scripted_listen" },
	{ .name = "keyring", .type = CONFIG_STRING, .offset = AT(keyring), .fallback = "/var/lib/ephemeral/control/keyring", .min = 1, .max = PATH_BYTES,
	  .help = "file with the sealing and hashing keys, mode 0400, equal on every controld of a deployment" },
	{ .name = "tls_dir", .type = CONFIG_STRING, .offset = AT(tls_dir), .fallback = "/var/lib/ephemeral/control/tls", .min = 1, .max = PATH_BYTES,
	  .help = "directory with the deployment's CA, the link's certificate and the root key for nodes" },
	{ .name = "link_addresses", .type = CONFIG_LIST, .offset = AT(link_addresses), .optional = true, .max = 400,
	  .help = "host:port,... under which nodes reach the link of every controld; written into join tokens; default: link_listen" },
	{ .name = "link_names", .type = CONFIG_LIST, .offset = AT(link_names), .fallback = "", .max = 1000,
	  .help = "more DNS names and IP addresses for the link's certificate, comma separated" },
	{ .name = "public_url", .type = CONFIG_STRING, .offset = AT(public_url), .optional = true, .min = 8, .max = 400,
	  .help = "URL under which clients reach the API; stands in problem types and run URLs; default: http:// and listen" },

	{ .name = "lease_seconds", .type = CONFIG_INT, .offset = AT(lease_seconds), .fallback = "60", .min = 3, .max = 3600,
	  .help = "seconds a node may go on without an answer before it must kill its runs" },
	{ .name = "lease_renew_seconds", .type = CONFIG_INT, .offset = AT(lease_renew_seconds), .fallback = "10", .min = 1, .max = 600,
	  .help = "seconds between renewals; at most a third of lease_seconds" },
	{ .name = "lease_grace_seconds", .type = CONFIG_INT, .offset = AT(lease_grace_seconds), .fallback = "10", .min = 1, .max = 600,
	  .help = "seconds after the lease before a node counts as lost" },
	{ .name = "queue_timeout_seconds", .type = CONFIG_INT, .offset = AT(queue_timeout_seconds), .fallback = "600", .min = 1, .max = DAY,
	  .help = "seconds a run may wait for a node before it fails with no_capacity" },
	{ .name = "ending_timeout_seconds", .type = CONFIG_INT, .offset = AT(ending_timeout_seconds), .fallback = "60", .min = 2, .max = 3600,
	  .help = "seconds a run may be ending (its VM destroyed, its finish not here yet) before it is swept" },
	{ .name = "max_timeout_seconds", .type = CONFIG_INT, .offset = AT(max_timeout_seconds), .fallback = "3600", .min = 1, .max = DAY,
	  .help = "largest timeout_seconds that a run may ask for" },
	{ .name = "default_timeout_seconds", .type = CONFIG_INT, .offset = AT(default_timeout_seconds), .fallback = "300", .min = 1, .max = DAY,
	  .help = "timeout_seconds of a run that names none" },
	{ .name = "retention_days", .type = CONFIG_INT, .offset = AT(retention_days), .fallback = "30", .min = 1, .max = 3650,
	  .help = "days that an ended run's record is kept" },

	{ .name = "max_cost_micros", .type = CONFIG_INT, .offset = AT(max_cost_micros), .fallback = "100000000", .min = 1, .max = PRICE_MICROS_MAX,
	  .help = "largest max_cost_micros that a run may ask for, millionths of a dollar" },
	{ .name = "default_cost_micros", .type = CONFIG_INT, .offset = AT(default_cost_micros), .fallback = "1000000", .min = 1, .max = PRICE_MICROS_MAX,
	  .help = "max_cost_micros of a run that names none, millionths of a dollar" },
	{ .name = "max_queued_per_org", .type = CONFIG_INT, .offset = AT(max_queued_per_org), .fallback = "1000", .min = 1, .max = 1000000,
	  .help = "runs that an organization may have queued" },
	{ .name = "max_running_per_org", .type = CONFIG_INT, .offset = AT(max_running_per_org), .fallback = "100", .min = 1, .max = 1000000,
	  .help = "runs that an organization may have running at once" },

	{ .name = "size_small", .type = CONFIG_STRING, .offset = AT(size_small), .fallback = "256,1", .min = 1, .max = 32,
	  .help = "memory in MiB and CPUs of size \"small\"" },
	{ .name = "size_standard", .type = CONFIG_STRING, .offset = AT(size_standard), .fallback = "512,1", .min = 1, .max = 32,
	  .help = "memory in MiB and CPUs of size \"standard\"" },
	{ .name = "size_large", .type = CONFIG_STRING, .offset = AT(size_large), .fallback = "2048,2", .min = 1, .max = 32,
	  .help = "memory in MiB and CPUs of size \"large\"" },

	{ .name = "http_connections", .type = CONFIG_INT, .offset = AT(http_connections), .fallback = "4096", .min = 8, .max = 100000,
	  .help = "connections that each HTTP listener holds" },
	{ .name = "http_body_budget_mib", .type = CONFIG_INT, .offset = AT(http_body_budget_mib), .fallback = "256", .min = 16, .max = 65536,
	  .help = "MiB of request bodies in flight before new ones get 503" },
	{ .name = "http_deadline_seconds", .type = CONFIG_INT, .offset = AT(http_deadline_seconds), .fallback = "30", .min = 1, .max = 600,
	  .help = "seconds that a client has to send a whole request" },
	{ .name = "http_idle_seconds", .type = CONFIG_INT, .offset = AT(http_idle_seconds), .fallback = "75", .min = 1, .max = 3600,
	  .help = "seconds that an idle connection is kept" },
	{ .name = "stream_clients", .type = CONFIG_INT, .offset = AT(stream_clients), .fallback = "2048", .min = 8, .max = 100000,
	  .help = "clients that may follow runs (event streams and waits) at once" },
	{ .name = "link_contexts", .type = CONFIG_INT, .offset = AT(link_contexts), .fallback = "1024", .min = 16, .max = 65536,
	  .help = "node requests held at once; a node takes one while it waits for work and one or two while its runs report" },
	{ .name = "link_poll_seconds", .type = CONFIG_INT, .offset = AT(link_poll_seconds), .fallback = "10", .min = 1, .max = 10,
	  .help = "longest wait of a node's poll" },
	{ .name = "start_wait_seconds", .type = CONFIG_INT, .offset = AT(start_wait_seconds), .fallback = "30", .min = 0, .max = 3600,
	  .help = "seconds to wait for Postgres at start" },
	{ .name = "stop_wait_seconds", .type = CONFIG_INT, .offset = AT(stop_wait_seconds), .fallback = "5", .min = 0, .max = 600,
	  .help = "seconds that requests under way get at SIGTERM" },

	{ .name = "hide_node", .type = CONFIG_BOOL, .offset = AT(hide_node), .fallback = "off",
	  .help = "leave the node's id out of what clients see" },
	{ .name = "callback_http", .type = CONFIG_BOOL, .offset = AT(callback_http), .fallback = "off",
	  .help = "allow http:// callback URLs beside https://" },
	{ .name = "log_level", .type = CONFIG_ENUM, .offset = AT(log_level), .fallback = "info", .choices = "debug|info|warn|error", .reloadable = true,
	  .help = "least level that is logged" },
	{ .name = "log_json", .type = CONFIG_BOOL, .offset = AT(log_json), .fallback = "off", .reloadable = true,
	  .help = "log JSON lines instead of text" },
};
static const size_t config_key_count = sizeof(config_keys) / sizeof(config_keys[0]);

static int parse_size(const char *key, const char *value, struct config_size *out, struct err *e)
{
	const char *comma = strchr(value, ',');
	char memory[32];
	int64_t mib, cpus;

	if (!comma || (size_t)(comma - value) >= sizeof(memory))
		return err_set(e, ERR_INVALID, "%s must be \"memory_mib,vcpus\", for example 512,1", key);
	memcpy(memory, value, (size_t)(comma - value));
	memory[comma - value] = '\0';
	if (text_i64(memory, 128, 1024 * 1024, &mib, e) != 0)
		return err_wrap(e, "%s: memory in MiB", key);
	if (text_i64(comma + 1, 1, 256, &cpus, e) != 0)
		return err_wrap(e, "%s: CPUs", key);
	out->memory_mib = (uint32_t)mib;
	out->vcpus = (uint32_t)cpus;
	return 0;
}

static int check_addr(const char *key, const char *value, struct err *e)
{
	char host[256];
	uint16_t port;

	if (config_addr(value, host, sizeof(host), &port, e) != 0)
		return err_wrap(e, "%s", key);
	return 0;
}

static int check_addresses(const struct config *c, struct err *e)
{
	char *copy, *rest, *part;
	int rc = 0;

	if (check_addr("listen", c->listen, e) != 0 || check_addr("operator_listen", c->operator_listen, e) != 0 ||
			check_addr("link_listen", c->link_listen, e) != 0)
		return -1;
	if (c->scripted_listen[0] != '\0') {
		if (check_addr("scripted_listen", c->scripted_listen, e) != 0)
			return -1;
		if (!c->scripted_token_file)
			return err_set(e, ERR_INVALID, "scripted_listen is set, but scripted_token_file is not: name a file that holds the bearer token");
	}
	if (!c->link_addresses)
		return 0;
	copy = rest = strdup(c->link_addresses);
	if (!copy)
		return err_set(e, ERR_NOMEM, "link_addresses: no memory");
	while (rc == 0 && (part = strsep(&rest, ",")) != NULL) {
		while (*part == ' ')
			part++;
		rc = check_addr("link_addresses", part, e);
	}
	free(copy);
	return rc;
}

static int check_numbers(const struct config *c, struct err *e)
{
	if (c->lease_renew_seconds * 3 > c->lease_seconds)
		return err_set(e, ERR_INVALID, "lease_renew_seconds is %" PRId64 ", but at most a third of lease_seconds (%" PRId64 ") is allowed",
				c->lease_renew_seconds, c->lease_seconds);
	if (c->default_timeout_seconds > c->max_timeout_seconds)
		return err_set(e, ERR_INVALID, "default_timeout_seconds is %" PRId64 ", above max_timeout_seconds (%" PRId64 ")",
				c->default_timeout_seconds, c->max_timeout_seconds);
	if (c->default_cost_micros > c->max_cost_micros)
		return err_set(e, ERR_INVALID, "default_cost_micros is %" PRId64 ", above max_cost_micros (%" PRId64 ")",
				c->default_cost_micros, c->max_cost_micros);
	if (c->public_url && strncmp(c->public_url, "http://", 7) != 0 && strncmp(c->public_url, "https://", 8) != 0)
		return err_set(e, ERR_INVALID, "public_url must begin with http:// or https://");
	if (c->public_url && c->public_url[strlen(c->public_url) - 1] == '/')
		return err_set(e, ERR_INVALID, "public_url must not end in a slash");
	return 0;
}

int config_read(struct config *c, const char *path, const char *const *overrides, size_t override_count, struct err *e)
{
	memset(c, 0, sizeof(*c));
	if (config_load(config_keys, config_key_count, c, path, overrides, override_count, e) != 0)
		goto fail;
	if (check_addresses(c, e) != 0 || check_numbers(c, e) != 0)
		goto fail;
	if (parse_size("size_small", c->size_small, &c->small, e) != 0 || parse_size("size_standard", c->size_standard, &c->standard, e) != 0 ||
			parse_size("size_large", c->size_large, &c->large, e) != 0)
		goto fail;
	return 0;
fail:
	config_release(c);
	return -1;
}

void config_release(struct config *c)
{
	config_free(config_keys, config_key_count, c);
	memset(c, 0, sizeof(*c));
}

static bool same_value(const struct config_key *k, const struct config *a, const struct config *b)
{
	const char *pa = (const char *)a + k->offset, *pb = (const char *)b + k->offset;

	if (k->type == CONFIG_BOOL)
		return *(const bool *)pa == *(const bool *)pb;
	if (k->type == CONFIG_INT || k->type == CONFIG_ENUM)
		return *(const int64_t *)(const void *)pa == *(const int64_t *)(const void *)pb;
	const char *sa = *(char *const *)(const void *)pa, *sb = *(char *const *)(const void *)pb;
	if (!sa || !sb)
		return sa == sb;
	return strcmp(sa, sb) == 0;
}

void config_reload(struct config *c, const struct config *fresh, size_t *kept)
{
	size_t others = 0;

	for (size_t i = 0; i < config_key_count; i++) {
		const struct config_key *k = &config_keys[i];

		if (same_value(k, c, fresh))
			continue;
		/* Only numbers and switches are reloadable: nobody may hold a pointer to a string that is replaced. */
		if (!k->reloadable || k->type == CONFIG_STRING || k->type == CONFIG_LIST) {
			others++;
			continue;
		}
		memcpy((char *)c + k->offset, (const char *)fresh + k->offset, k->type == CONFIG_BOOL ? sizeof(bool) : sizeof(int64_t));
	}
	if (kept)
		*kept = others;
}

void config_print_help(struct buf *out)
{
	config_help(config_keys, config_key_count, out);
}
