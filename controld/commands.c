/*
 * The subcommands that run and end: -t, bootstrap, migrate, check-ledger. Called by main.c; synchronous, they block on files and on
 * Postgres. Results go to stdout, everything else to stderr.
 */
#include "program.h"

#include "pki.h"
#include "scripted/scripted.h"
#include "secrets.h"
#include "store/store.h"

#include "../common/clock.h"
#include "../common/ids.h"
#include "../common/log.h"
#include "../common/text.h"

#include <inttypes.h>
#include <libpq-fe.h>
#include <sodium.h>
#include <time.h>

#define PING_EVERY_MS 200
#define SAY_EVERY_MS 5000

static int failed(const struct err *e)
{
	fprintf(stderr, "controld: %s\n", e->text);
	return EXIT_FAILED;
}

static const char *ping_text(PGPing p)
{
	switch (p) {
	case PQPING_REJECT: return "it is starting up or refuses connections";
	case PQPING_NO_RESPONSE: return "nothing answers there";
	default: return "it does not answer";
	}
}

int wait_for_database(const struct config *config, struct err *e)
{
	int64_t begin = clock_boot_ms(), said = begin, now;
	struct timespec pause = { .tv_nsec = PING_EVERY_MS * INT64_C(1000000) };
	PGPing p;

	for (;;) {
		p = PQping(config->database);
		if (p == PQPING_OK)
			return 0;
		if (p == PQPING_NO_ATTEMPT)
			return err_set(e, ERR_INVALID,
					"database: this is not a usable libpq connection string; "
					"write for example \"host=/run/postgresql dbname=ephemeral user=ephemeral\"");
		now = clock_boot_ms();
		if (now - begin >= config->start_wait_seconds * 1000)
			return err_set(e, ERR_UNAVAILABLE,
					"Postgres did not take connections within %" PRId64
					" s (%s): start it, or correct the key database",
					config->start_wait_seconds, ping_text(p));
		if (now - said >= SAY_EVERY_MS) {
			said = now;
			log_warn("waiting for postgres waited_seconds=%" PRId64 " of=%" PRId64 " reason=\"%s\"",
					(now - begin) / 1000, config->start_wait_seconds, ping_text(p));
		}
		nanosleep(&pause, NULL);
	}
}

int command_test(const struct config *config)
{
	struct secrets *secrets = NULL;
	struct pki *pki = NULL;
	struct err e;
	int status = EXIT_OK;

	if (secrets_load(config->keyring, &secrets, &e) != 0 || pki_load(config->tls_dir, &pki, &e) != 0 ||
			(config->scripted_listen[0] && scripted_check_token(config->scripted_token_file, &e) != 0))
		status = failed(&e);
	secrets_free(secrets);
	pki_free(pki);
	if (status == EXIT_OK)
		puts("configuration ok");
	return status;
}

int command_migrate(const struct config *config)
{
	struct err e;
	int applied = 0;

	if (wait_for_database(config, &e) != 0 || store_migrate(config->database, &applied, &e) != 0)
		return failed(&e);
	if (applied == 0)
		puts("the schema is up to date");
	else
		printf("%d migration%s applied\n", applied, applied == 1 ? "" : "s");
	return EXIT_OK;
}

int command_check_ledger(const struct arguments *args, const struct config *config)
{
	struct err e;
	int rc;

	if (wait_for_database(config, &e) != 0)
		return failed(&e);
	rc = store_check_ledger(config->database, args->full, stdout, &e);
	if (rc < 0)
		return failed(&e);
	return rc == 0 ? EXIT_OK : EXIT_FAILED;
}

/* --- bootstrap --------------------------------------------------------------------------------------------------------------- */

static int make_files(const struct arguments *args, const struct config *config, struct err *e)
{
	struct pki_made pki;
	bool keyring;

	if (secrets_create(config->keyring, &keyring, e) != 0 || pki_bootstrap(config->tls_dir, config->link_names, &pki, e) != 0)
		return -1;
	if (args->json)
		return 0;
	printf("keyring       %s (%s)\n", config->keyring,
			keyring ? "made: keep a copy, without it no key works any more" : "kept");
	printf("certificates  %s (CA %s, server %s, root key %s)\n", config->tls_dir, pki.ca ? "made" : "kept",
			pki.server ? "made" : "kept", pki.root ? "made" : "kept");
	return 0;
}

/* The key is printed once and kept nowhere: Postgres has its keyed hash. */
static int make_operator_key(const struct config *config, char key[64], struct err *e)
{
	struct secrets *secrets;
	uint8_t hash[SECRETS_HASH_LEN];
	int rc;

	if (secrets_load(config->keyring, &secrets, e) != 0)
		return -1;
	id_secret_make("ephop_", key);
	secrets_key_hash(secrets, key, hash);
	rc = store_operator_key_add(config->database, hash, "bootstrap", e);
	secrets_free(secrets);
	return rc;
}

int command_bootstrap(const struct arguments *args, const struct config *config)
{
	char key[64] = "";
	struct err e;
	int64_t keys;
	int applied = 0;

	if (make_files(args, config, &e) != 0 || wait_for_database(config, &e) != 0 ||
			store_migrate(config->database, &applied, &e) != 0 ||
			store_operator_key_count(config->database, &keys, &e) != 0)
		return failed(&e);
	if ((keys == 0 || args->new_operator_key) && make_operator_key(config, key, &e) != 0)
		return failed(&e);
	if (args->json && key[0])
		printf("{\"operator_key\":\"%s\"}\n", key);
	else if (args->json)
		puts("{\"operator_key\":null}");
	else {
		printf("schema        %d migration%s applied\n", applied, applied == 1 ? "" : "s");
		if (key[0])
			printf("operator key  %s\n              shown once; it works on operator_listen only\n", key);
		else
			printf("operator key  kept (%" PRId64 " in use; --new-operator-key makes another)\n", keys);
	}
	sodium_memzero(key, sizeof(key));
	return EXIT_OK; /* main() says so where it could not be written */
}
