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

#define PATH_BYTES 4000
#define DAY INT64_C(86400)

/* name, default, least and most (of a text: its length), help, then what is special about the key. */
#define KEY(key, kind, def, lo, hi, ...)                                                                                           \
	{                                                                                                                          \
		.name = #key, .type = kind, .offset = offsetof(struct config, key), .fallback = def, .min = lo, .max = hi,         \
		.help = __VA_ARGS__                                                                                                \
	}
#define TEXT(key, def, lo, hi, ...) KEY(key, CONFIG_STRING, def, lo, hi, __VA_ARGS__)
#define LIST(key, def, lo, hi, ...) KEY(key, CONFIG_LIST, def, lo, hi, __VA_ARGS__)
#define NUMBER(key, def, lo, hi, ...) KEY(key, CONFIG_INT, def, lo, hi, __VA_ARGS__)
#define SWITCH(key, def, ...) KEY(key, CONFIG_BOOL, def, 0, 0, __VA_ARGS__)
#define CHOICE(key, def, of, ...) KEY(key, CONFIG_ENUM, def, 0, 0, __VA_ARGS__, .choices = of)

/* clang-format off */
static const struct config_key config_keys[] = {
	TEXT(database, "dbname=ephemeral", 1, 2000,
		"Postgres as a libpq connection string, for example \"host=/run/postgresql dbname=ephemeral user=ephemeral\"", .secret = true),
	TEXT(listen, "127.0.0.1:8080", 1, 300, "address of the public API, host:port; port 0 = any free one"),
	TEXT(operator_listen, "127.0.0.1:8081", 1, 300, "address of the operator API (operator keys work only here), host:port"),
	TEXT(link_listen, ":7443", 1, 300, "address that nodes dial, host:port, TLS"),
	TEXT(metrics_listen, "127.0.0.1:9464", 0, 300, "metrics for Prometheus, host:port, without a key; empty = off"),
	TEXT(scripted_listen, "", 0, 300, "address of the scripted model provider (a script, not a model), host:port; empty = off"),
	TEXT(scripted_token_file, NULL, 0, PATH_BYTES,
		"file with the bearer token of the scripted provider; needed with scripted_listen", .optional = true),
	TEXT(keyring, "/var/lib/ephemeral/control/keyring", 1, PATH_BYTES,
		"file with the sealing and hashing keys, mode 0400, equal on every controld of a deployment"),
	TEXT(tls_dir, "/var/lib/ephemeral/control/tls", 1, PATH_BYTES,
		"directory with the deployment's CA, the link's certificate and the root key for nodes"),
	LIST(link_addresses, NULL, 0, 400,
		"host:port,... under which nodes reach the link of every controld; written into join tokens; default: link_listen", .optional = true),
	LIST(link_names, "", 0, 1000, "more DNS names and IP addresses for the link's certificate, comma separated"),
	TEXT(public_url, NULL, 8, 400,
		"URL under which clients reach the API; stands in problem types and run URLs; default: http:// and listen", .optional = true),

	NUMBER(lease_seconds, "60", 3, 3600, "seconds a node may go on without an answer before it must kill its runs"),
	NUMBER(lease_renew_seconds, "10", 1, 600, "seconds between renewals; at most a third of lease_seconds"),
	NUMBER(lease_grace_seconds, "10", 1, 600, "seconds after the lease before a node counts as lost"),
	NUMBER(queue_timeout_seconds, "600", 1, DAY, "seconds a run may wait for a node before it fails with no_capacity"),
	NUMBER(ending_timeout_seconds, "60", 2, 3600,
		"seconds a run may be ending (its VM destroyed, its finish not here yet) before it is swept"),
	NUMBER(max_timeout_seconds, "3600", 1, DAY, "largest timeout_seconds that a run may ask for"),
	NUMBER(default_timeout_seconds, "300", 1, DAY, "timeout_seconds of a run that names none"),
	NUMBER(retention_days, "30", 1, 3650, "days that an ended run's record is kept"),

	NUMBER(max_cost_micros, "100000000", 1, PRICE_MICROS_MAX,
		"largest max_cost_micros that a run may ask for, millionths of a dollar"),
	NUMBER(default_cost_micros, "1000000", 1, PRICE_MICROS_MAX,
		"max_cost_micros of a run that names none, millionths of a dollar"),
	NUMBER(max_queued_per_org, "1000", 1, 1000000, "runs that an organization may have queued"),
	NUMBER(max_running_per_org, "100", 1, 1000000, "runs that an organization may have running at once"),

	TEXT(size_small, "256,1", 1, 32, "memory in MiB and CPUs of size \"small\""),
	TEXT(size_standard, "512,1", 1, 32, "memory in MiB and CPUs of size \"standard\""),
	TEXT(size_large, "2048,2", 1, 32, "memory in MiB and CPUs of size \"large\""),

	NUMBER(http_connections, "4096", 8, 100000, "connections that each HTTP listener holds"),
	NUMBER(http_body_budget_mib, "256", 16, 65536, "MiB of request bodies in flight before new ones get 503"),
	NUMBER(http_deadline_seconds, "30", 1, 600, "seconds that a client has to send a whole request"),
	NUMBER(http_idle_seconds, "75", 1, 3600, "seconds that an idle connection is kept"),
	NUMBER(stream_clients, "2048", 8, 100000, "clients that may follow runs (event streams and waits) at once"),
	NUMBER(link_contexts, "1024", 16, 65536,
		"node requests held at once; a node takes one while it waits for work and one or two while its runs report"),
	NUMBER(link_poll_seconds, "10", 1, 10, "longest wait of a node's poll"),
	NUMBER(start_wait_seconds, "30", 0, 3600, "seconds to wait for Postgres at start"),
	NUMBER(stop_wait_seconds, "5", 0, 600, "seconds that requests under way get at SIGTERM"),

	SWITCH(hide_node, "off", "leave the node's name and id out of what clients see (runs, events, receipts)"),
	SWITCH(callback_http, "off", "allow http:// callback URLs beside https://"),
	CHOICE(log_level, "info", "debug|info|warn|error", "least level that is logged", .reloadable = true),
	SWITCH(log_json, "off", "log JSON lines instead of text", .reloadable = true),
};
/* clang-format on */
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
	if (c->metrics_listen[0] != '\0' && check_addr("metrics_listen", c->metrics_listen, e) != 0)
		return -1;
	if (c->scripted_listen[0] != '\0') {
		if (check_addr("scripted_listen", c->scripted_listen, e) != 0)
			return -1;
		if (!c->scripted_token_file)
			return err_set(e, ERR_INVALID,
					"scripted_listen is set, but scripted_token_file is not: name a file that holds the bearer "
					"token");
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
		return err_set(e, ERR_INVALID,
				"lease_renew_seconds is %" PRId64 ", but at most a third of lease_seconds (%" PRId64 ") is allowed",
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
	if (parse_size("size_small", c->size_small, &c->small, e) != 0 ||
			parse_size("size_standard", c->size_standard, &c->standard, e) != 0 ||
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
		memcpy((char *)c + k->offset, (const char *)fresh + k->offset,
				k->type == CONFIG_BOOL ? sizeof(bool) : sizeof(int64_t));
	}
	if (kept)
		*kept = others;
}

void config_print_help(struct buf *out)
{
	config_help(config_keys, config_key_count, out);
}
