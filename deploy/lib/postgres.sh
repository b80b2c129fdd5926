# shellcheck shell=bash
# A private Postgres: data below var/, a socket below /run, no TCP. Postgres refuses to run as root, and its user cannot walk into a clone
# below /root; so its data directory is bound to a short path in a mount namespace that only Postgres is in. Only root and postgres can
# connect (peer). Sourced by quickstart.

PG_BIN=/usr/lib/postgresql/15/bin
PG_DATA=$RUN/pgdata  # where Postgres sees its data
PG_SOCKET=$RUN/pg    # where everybody sees its socket

# in_postgres COMMAND...: as user postgres, in a namespace where PG_DATA is var/pg.
in_postgres() {
	"$TOP/deploy/lib/postgres-exec" "$VAR/pg" "$PG_DATA" "$@"
}

sql() {
	setpriv --reuid=postgres --regid=postgres --init-groups env --chdir=/ "$PG_BIN/psql" -X -q -A -t -v ON_ERROR_STOP=1 -h "$PG_SOCKET" -d "$1" -c "$2"
}

postgres_initdb() {
	local log=$VAR/log/postgres.log
	if ! in_postgres "$PG_BIN/initdb" -D "$PG_DATA" -U postgres --auth=peer --encoding=UTF8 --locale=C.UTF-8 >>"$log" 2>&1; then
		fail "the database could not be made" "remove $VAR/pg and start again" "$log"
	fi
	cat >"$VAR/pg/postgresql.conf" <<-CONF
		# written by deploy/quickstart
		listen_addresses = ''
		unix_socket_directories = '$PG_SOCKET'
		max_connections = 40
		shared_buffers = 128MB
		logging_collector = off
		# an error's DETAIL would hold the row, and so a prompt
		log_error_verbosity = terse
		log_timezone = UTC
		timezone = UTC
	CONF
	echo 'local all all peer map=quickstart' >"$VAR/pg/pg_hba.conf"
	printf 'quickstart root ephemeral\nquickstart postgres postgres\n' >"$VAR/pg/pg_ident.conf"
	chown postgres:postgres "$VAR/pg/postgresql.conf" "$VAR/pg/pg_hba.conf" "$VAR/pg/pg_ident.conf"
}

postgres_start() {
	local fresh='' deadline log=$VAR/log/postgres.log
	step database "starting"
	if [ -n "$(pid_of postgres)" ]; then
		done_step "running"
		return 0
	fi
	install -d -m 0755 "$RUN"
	install -d -m 0755 -o postgres -g postgres "$PG_DATA" "$PG_SOCKET"
	install -d -m 0700 -o postgres -g postgres "$VAR/pg"
	if [ ! -s "$VAR/pg/PG_VERSION" ]; then
		fresh=1
		find "$VAR/pg" -mindepth 1 -delete
		moving "making"
		postgres_initdb
	fi
	start_process postgres "$TOP/deploy/lib/postgres-exec" "$VAR/pg" "$PG_DATA" "$PG_BIN/postgres" -D "$PG_DATA"
	deadline=$((SECONDS + 60))
	until sql postgres 'SELECT 1' >/dev/null 2>&1; do
		if [ -z "$(pid_of postgres)" ] || [ "$SECONDS" -ge "$deadline" ]; then
			fail "Postgres does not start" "the log says why; if its data is damaged: deploy/quickstart down, remove $VAR/pg, start again" "$log"
		fi
		moving "starting"
		sleep 0.05
	done
	if [ "$(sql postgres "SELECT count(*) FROM pg_database WHERE datname = 'ephemeral'")" = 0 ]; then
		fresh=1
		sql postgres 'CREATE ROLE ephemeral LOGIN' >>"$log" 2>&1 || true
		sql postgres 'CREATE DATABASE ephemeral OWNER ephemeral' >>"$log" 2>&1 || fail "the database could not be made" "see the log" "$log"
	fi
	if [ -n "$fresh" ]; then forget_setup; fi
	done_step "${fresh:+made, }private Postgres, data in var/pg, no TCP"
}
