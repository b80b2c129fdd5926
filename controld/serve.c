/*
 * The service: brings the parts up in order, runs the loop, takes signals, brings the parts down. Called by main.c. The only file
 * that knows all parts; they meet in the hooks here.
 *
 * Up:    keyring, certificates, Postgres (waited for, migrated), store, node link, scripted provider, API, metrics, jobs, ready.
 * Down:  nothing new is taken and parked requests are answered; what is under way gets stop_wait_seconds; jobs, API, then the
 * store, which calls back what is outstanding, then the node link whose requests wait for those calls.
 */
#include "program.h"

#include "api/api.h"
#include "dispatch/dispatch.h"
#include "jobs/jobs.h"
#include "metrics/metrics.h"
#include "pki.h"
#include "scripted/scripted.h"
#include "secrets.h"
#include "store/store.h"

#include "../common/clock.h"
#include "../common/config.h"
#include "../common/json.h"
#include "../common/log.h"
#include "../common/text.h"

#include <errno.h>
#include <event2/event.h>
#include <inttypes.h>
#include <signal.h>
#include <unistd.h>

#define STOP_CHECK_MS 20
#define CERT_WARN_DAYS 30

struct service {
	const struct arguments *args;
	struct config *config;
	struct event_base *base;
	struct secrets *secrets;
	struct pki *pki;
	struct store *store;
	struct dispatch *dispatch;
	struct scripted *scripted;
	struct api *api;
	struct jobs *jobs;
	struct control_metrics *metrics;
	uint8_t root_key[32];
	char link_addresses[600];
	struct event *on_term, *on_int, *on_hup, *stop_timer;
	bool stopping;
	int64_t stop_by_ms; /* boot clock */
};

/* --- hooks between the parts ------------------------------------------------------------------------------------------------- */

static void on_queued(void *arg, uint32_t memory_mib, uint32_t vcpus, bool allow_emulated, uint32_t count)
{
	struct service *s = arg;

	if (s->dispatch)
		dispatch_wake_queued(s->dispatch, memory_mib, vcpus, allow_emulated, count);
}

static void on_node(void *arg, const char *node_id)
{
	struct service *s = arg;

	if (s->dispatch)
		dispatch_wake_node(s->dispatch, node_id);
}

static void not_ready(void *arg, struct buf *reasons)
{
	struct service *s = arg;
	const char *why;

	if (s->dispatch && !dispatch_healthy(s->dispatch, &why))
		buf_printf(reasons, "%s\n", why);
}

/* --- up ---------------------------------------------------------------------------------------------------------------------- */

static int load_files(struct service *s, struct err *e)
{
	if (secrets_load(s->config->keyring, &s->secrets, e) != 0 || pki_load(s->config->tls_dir, &s->pki, e) != 0) {
		if (e->code == ERR_NOT_FOUND) {
			struct err wrapped = *e;

			return err_set(e, ERR_NOT_FOUND, "%s; run `controld bootstrap` with the same configuration once",
					wrapped.text);
		}
		return -1;
	}
	pki_root_public(s->pki, s->root_key);
	if (pki_server_days(s->pki) < CERT_WARN_DAYS)
		log_warn("the link's certificate ends in %" PRId64 " days: run `controld bootstrap` and restart",
				pki_server_days(s->pki));
	return 0;
}

static int open_database(struct service *s, struct err *e)
{
	const struct config *c = s->config;
	struct store_hooks hooks = { .on_queued = on_queued, .on_node = on_node, .arg = s };
	struct store_options opt = {
		.conninfo = c->database,
		.lease_ms = c->lease_seconds * 1000,
		.lease_grace_ms = c->lease_grace_seconds * 1000,
		.queue_timeout_ms = c->queue_timeout_seconds * 1000,
		.ending_timeout_ms = c->ending_timeout_seconds * 1000,
		.retention_ms = c->retention_days * 86400 * 1000,
		.max_queued_per_org = c->max_queued_per_org,
		.max_running_per_org = c->max_running_per_org,
		.hide_node = c->hide_node,
	};
	int applied = 0;

	if (wait_for_database(c, e) != 0 || store_migrate(c->database, &applied, e) != 0)
		return -1;
	if (applied > 0)
		log_info("schema brought up to date migrations=%d", applied);
	if (store_open(s->base, &opt, &s->store, e) != 0)
		return -1;
	store_set_hooks(s->store, &hooks);
	return 0;
}

/* What join tokens carry: link_addresses, else the address that is bound; one that means "all" is of no use to a host. */
static int make_link_addresses(struct service *s, struct err *e)
{
	const char *bound = dispatch_address(s->dispatch), *from = s->config->link_addresses;
	struct buf b = BUF_INIT(sizeof(s->link_addresses) - 1);
	char *copy, *rest, *part;
	int rc = 0;

	if (!from && (strncmp(bound, "0.0.0.0:", 8) == 0 || strncmp(bound, "[::]:", 5) == 0 || strncmp(bound, "*:", 2) == 0)) {
		log_warn("link_addresses is not set: join tokens will carry this machine's loopback address, good for a node on "
			 "the same machine only");
		from = NULL;
		buf_printf(&b, "tls+tcp://127.0.0.1%s", strrchr(bound, ':'));
	} else {
		copy = rest = strdup(from ? from : bound);
		if (!copy)
			return err_set(e, ERR_NOMEM, "no memory");
		while ((part = strsep(&rest, ",")) != NULL)
			buf_printf(&b, "%stls+tcp://%s", b.len ? "," : "", part + strspn(part, " "));
		free(copy);
	}
	if (b.failed || !buf_cstr(&b) || !text_copy(s->link_addresses, sizeof(s->link_addresses), (const char *)b.data))
		rc = err_set(e, ERR_LIMIT, "link_addresses is too long");
	buf_free(&b);
	return rc;
}

static int start_link(struct service *s, struct err *e)
{
	const struct config *c = s->config;
	int64_t poll = c->link_poll_seconds < c->lease_renew_seconds ? c->link_poll_seconds : c->lease_renew_seconds;
	struct dispatch_options opt = {
		.base = s->base,
		.store = s->store,
		.secrets = s->secrets,
		.pki = s->pki,
		.listen = c->link_listen,
		.contexts_max = (int)c->link_contexts,
		.poll_ms = (int)poll * 1000,
	};

	if (dispatch_start(&opt, &s->dispatch, e) != 0)
		return -1;
	return make_link_addresses(s, e);
}

static int start_scripted(struct service *s, struct err *e)
{
	struct scripted_options opt = {
		.base = s->base, .listen = s->config->scripted_listen, .token_file = s->config->scripted_token_file
	};

	if (!s->config->scripted_listen[0])
		return 0;
	return scripted_start(&opt, &s->scripted, e);
}

static struct api_size_spec size_of(const struct config_size *from)
{
	struct api_size_spec to = { .memory_mib = from->memory_mib, .vcpus = from->vcpus };

	return to;
}

static int start_api(struct service *s, struct err *e)
{
	const struct config *c = s->config;
	struct api_options opt = {
		.base = s->base,
		.store = s->store,
		.secrets = s->secrets,
		.listen = c->listen,
		.operator_listen = c->operator_listen,
		.public_url = c->public_url,
		.link_addresses = s->link_addresses,
		.ca_pem = pki_ca_pem(s->pki),
		.root_key = s->root_key,
		.default_timeout_seconds = c->default_timeout_seconds,
		.max_timeout_seconds = c->max_timeout_seconds,
		.default_cost_micros = c->default_cost_micros,
		.max_cost_micros = c->max_cost_micros,
		.max_queued_per_org = c->max_queued_per_org,
		.max_running_per_org = c->max_running_per_org,
		.queue_timeout_seconds = c->queue_timeout_seconds,
		.hide_node = c->hide_node,
		.http_connections = c->http_connections,
		.http_body_budget_mib = c->http_body_budget_mib,
		.http_deadline_seconds = c->http_deadline_seconds,
		.http_idle_seconds = c->http_idle_seconds,
		.stream_clients = c->stream_clients,
		.not_ready = not_ready, /* no `wake`: the store's hooks tell the node link the same, and of other controlds too */
		.arg = s,
	};

	opt.sizes[API_SIZE_SMALL] = size_of(&c->small);
	opt.sizes[API_SIZE_STANDARD] = size_of(&c->standard);
	opt.sizes[API_SIZE_LARGE] = size_of(&c->large);
	return api_start(&opt, &s->api, e);
}

static int start_metrics(struct service *s, struct err *e)
{
	const struct control_metrics_options opt = {
		.base = s->base, .listen = s->config->metrics_listen, .store = s->store, .dispatch = s->dispatch, .api = s->api
	};

	if (!s->config->metrics_listen[0])
		return 0;
	return control_metrics_start(&opt, &s->metrics, e);
}

/* One line, then the descriptor is closed: whoever waits reads to its end. */
static int say_ready(struct service *s, struct err *e)
{
	struct buf b = BUF_INIT(4096);
	struct jw w;
	int rc = 0;

	jw_init(&w, &b);
	jw_object(&w);
	jw_kstr(&w, "api", api_address(s->api));
	jw_kstr(&w, "operator", api_operator_address(s->api));
	jw_kstr(&w, "link", dispatch_address(s->dispatch));
	jw_kstr(&w, "metrics", s->metrics ? control_metrics_address(s->metrics) : NULL);
	jw_kstr(&w, "scripted", s->scripted ? scripted_address(s->scripted) : NULL);
	jw_close(&w);
	if (!jw_end(&w) || !buf_add_char(&b, '\n'))
		rc = err_set(e, ERR_NOMEM, "no memory");
	log_info("ready api=%s operator=%s link=%s metrics=%s scripted=%s", api_address(s->api), api_operator_address(s->api),
			dispatch_address(s->dispatch), s->metrics ? control_metrics_address(s->metrics) : "off",
			s->scripted ? scripted_address(s->scripted) : "off");
	if (rc == 0 && s->args->ready_fd >= 0) {
		if (write(s->args->ready_fd, b.data, b.len) != (ssize_t)b.len)
			rc = err_set_errno(e, "--ready-fd %d", s->args->ready_fd);
		close(s->args->ready_fd);
	}
	buf_free(&b);
	return rc;
}

/* --- signals ----------------------------------------------------------------------------------------------------------------- */

static void check_stop(struct service *s)
{
	struct timeval tv = { .tv_usec = STOP_CHECK_MS * 1000 };
	bool idle = api_idle(s->api) && dispatch_idle(s->dispatch);

	if (!idle && clock_boot_ms() < s->stop_by_ms) {
		evtimer_add(s->stop_timer, &tv);
		return;
	}
	if (!idle)
		log_warn("stopping with requests under way: they took longer than stop_wait_seconds");
	event_base_loopbreak(s->base);
}

static void on_stop_timer(evutil_socket_t fd, short what, void *arg)
{
	(void)fd;
	(void)what;
	check_stop(arg);
}

static void on_stop(evutil_socket_t number, short what, void *arg)
{
	struct service *s = arg;

	(void)what;
	if (s->stopping) {
		log_warn("stopping at once: second signal");
		event_base_loopbreak(s->base);
		return;
	}
	log_info("stopping signal=%s", number == SIGTERM ? "TERM" : "INT");
	s->stopping = true;
	s->stop_by_ms = clock_boot_ms() + s->config->stop_wait_seconds * 1000;
	api_drain(s->api);
	dispatch_drain(s->dispatch);
	if (s->scripted)
		scripted_drain(s->scripted);
	check_stop(s);
}

static void on_reload(evutil_socket_t number, short what, void *arg)
{
	struct service *s = arg;
	struct config fresh;
	struct err e;
	size_t kept;

	(void)number;
	(void)what;
	if (config_read(&fresh, s->args->config_path, s->args->overrides, s->args->override_count, &e) != 0) {
		log_error("configuration not read again, the old one holds reason=\"%s\"", e.text);
		return;
	}
	config_reload(s->config, &fresh, &kept);
	config_release(&fresh);
	log_init("controld", (enum log_level)s->config->log_level, s->config->log_json);
	if (kept > 0)
		log_warn("configuration read again; %zu changed keys take a restart", kept);
	else
		log_info("configuration read again");
}

static int add_signals(struct service *s, struct err *e)
{
	s->on_term = evsignal_new(s->base, SIGTERM, on_stop, s);
	s->on_int = evsignal_new(s->base, SIGINT, on_stop, s);
	s->on_hup = evsignal_new(s->base, SIGHUP, on_reload, s);
	s->stop_timer = evtimer_new(s->base, on_stop_timer, s);
	if (!s->on_term || !s->on_int || !s->on_hup || !s->stop_timer || evsignal_add(s->on_term, NULL) != 0 ||
			evsignal_add(s->on_int, NULL) != 0 || evsignal_add(s->on_hup, NULL) != 0)
		return err_set(e, ERR_NOMEM, "no memory for signals");
	return 0;
}

static int start(struct service *s, struct err *e)
{
	if (load_files(s, e) != 0 || open_database(s, e) != 0)
		return -1;
	if (start_link(s, e) != 0 || start_scripted(s, e) != 0 || start_api(s, e) != 0)
		return -1;
	if (start_metrics(s, e) != 0 || jobs_new(s->base, s->store, &s->jobs, e) != 0 || add_signals(s, e) != 0)
		return -1;
	return say_ready(s, e);
}

static void stop(struct service *s)
{
	struct event *events[] = { s->on_term, s->on_int, s->on_hup, s->stop_timer };
	struct store_hooks none = { .arg = NULL };

	/* First: dispatch_free turns the loop once more. */
	for (size_t i = 0; i < sizeof(events) / sizeof(events[0]); i++) {
		if (events[i])
			event_free(events[i]);
	}
	control_metrics_free(s->metrics);
	jobs_free(s->jobs);
	if (s->api)
		api_free(s->api);
	scripted_free(s->scripted);
	if (s->store) {
		store_set_hooks(s->store, &none);
		store_close(s->store);
	}
	dispatch_free(s->dispatch);
	event_base_free(s->base);
	pki_free(s->pki);
	secrets_free(s->secrets);
}

int serve_run(const struct arguments *args, struct config *config)
{
	struct service s = { .args = args, .config = config };
	struct err e;
	int status = EXIT_OK;

	s.base = event_base_new();
	if (!s.base) {
		log_error("no event loop");
		return EXIT_FAILED;
	}
	log_info("starting version=%s", EPHEMERAL_VERSION);
	if (start(&s, &e) != 0) {
		log_error("could not start reason=\"%s\"%s", e.text,
				e.sys == EADDRINUSE ? " hint=\"another controld, or another program, listens there\"" : "");
		status = EXIT_FAILED;
	} else if (event_base_dispatch(s.base) < 0) {
		log_error("the event loop failed");
		status = EXIT_FAILED;
	}
	stop(&s);
	if (status == EXIT_OK)
		log_info("stopped");
	return status;
}
