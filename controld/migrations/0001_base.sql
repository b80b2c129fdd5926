-- Time, settings, organizations with their wallets, keys, and the ledger.
--
-- Times are Unix milliseconds (bigint, *_ms), money is micros. Nothing reads the clock but eph_now_ms(): a database for tests
-- replaces eph_clock_offset_ms() to move all of it.

CREATE FUNCTION eph_clock_offset_ms() RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE AS 'SELECT 0::bigint';

CREATE FUNCTION eph_now_ms() RETURNS bigint LANGUAGE sql VOLATILE PARALLEL SAFE AS $$
	SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint + eph_clock_offset_ms()
$$;

CREATE FUNCTION eph_now() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE AS $$
	SELECT clock_timestamp() + eph_clock_offset_ms() * interval '1 millisecond'
$$;

CREATE TABLE settings (
	name text PRIMARY KEY,
	value text NOT NULL
);

-- Texts of the error codes, kept equal to proto/errcode.h by every controld that migrates.
CREATE TABLE error_codes (
	code text PRIMARY KEY,
	status text NOT NULL,
	title text NOT NULL,
	remedy text NOT NULL
);

-- Which binaries run against this database; a contracting migration is refused while an older one is here.
CREATE TABLE binaries (
	instance text PRIMARY KEY,
	version text NOT NULL,
	schema_version integer NOT NULL,
	seen_at_ms bigint NOT NULL
);

-- Raised when a failover may have lost commits: tokens of before are void then.
CREATE TABLE cluster (
	one boolean PRIMARY KEY DEFAULT true CHECK (one),
	epoch bigint NOT NULL DEFAULT 1
);
INSERT INTO cluster DEFAULT VALUES;

CREATE TABLE organizations (
	id text PRIMARY KEY,
	name text NOT NULL UNIQUE CHECK (octet_length(name) BETWEEN 1 AND 128),
	disabled boolean NOT NULL DEFAULT false,
	allow_emulated boolean NOT NULL DEFAULT false,
	default_model text NOT NULL DEFAULT '',
	default_cost_micros bigint NOT NULL DEFAULT 0 CHECK (default_cost_micros >= 0),
	created_at_ms bigint NOT NULL
);
CREATE INDEX organizations_new ON organizations (created_at_ms DESC, id DESC);

-- The wallet, and what admission counts: `admitted` runs hold one of max_running places (from the moment they are ready in the
-- queue until they are settled), `open` are all that are not settled. NULL limits are the deployment's.
CREATE TABLE org_hot (
	org_id text PRIMARY KEY REFERENCES organizations,
	balance bigint NOT NULL DEFAULT 0,
	reserved bigint NOT NULL DEFAULT 0,
	unlimited boolean NOT NULL DEFAULT false,
	admitted bigint NOT NULL DEFAULT 0 CHECK (admitted >= 0),
	open bigint NOT NULL DEFAULT 0 CHECK (open >= 0),
	max_running bigint CHECK (max_running > 0),
	max_queued bigint CHECK (max_queued > 0),
	CONSTRAINT wallet CHECK (reserved >= 0 AND (unlimited OR reserved <= balance))
) WITH (fillfactor = 50);

CREATE TABLE members (
	id text PRIMARY KEY,
	org_id text NOT NULL REFERENCES organizations,
	name text NOT NULL,
	email text NOT NULL DEFAULT '',
	role text NOT NULL,
	created_at_ms bigint NOT NULL,
	removed_at_ms bigint
);
CREATE INDEX members_org ON members (org_id, created_at_ms DESC, id DESC);

CREATE TABLE api_keys (
	id text PRIMARY KEY,
	org_id text NOT NULL REFERENCES organizations,
	member_id text REFERENCES members,
	name text NOT NULL DEFAULT '',
	role text NOT NULL,
	key_hash bytea NOT NULL UNIQUE CHECK (length(key_hash) = 32),
	created_at_ms bigint NOT NULL,
	expires_at_ms bigint,
	revoked_at_ms bigint,
	last_used_at_ms bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 80);
CREATE INDEX api_keys_org ON api_keys (org_id, created_at_ms DESC, id DESC);

CREATE TABLE operator_keys (
	id text PRIMARY KEY,
	name text NOT NULL DEFAULT '',
	key_hash bytea NOT NULL UNIQUE CHECK (length(key_hash) = 32),
	created_at_ms bigint NOT NULL,
	revoked_at_ms bigint
);

-- The ledger: rows are added, never changed. balance = sum(balance_delta), reserved = sum(reserved_delta). `xid` tells check-ledger
-- which rows were final when it last looked.
CREATE SEQUENCE ledger_id;
CREATE TABLE ledger (
	id bigint NOT NULL DEFAULT nextval('ledger_id'),
	at_ms bigint NOT NULL,
	org_id text NOT NULL,
	run_id text COLLATE "C",
	kind text NOT NULL,
	balance_delta bigint NOT NULL,
	reserved_delta bigint NOT NULL,
	note text,
	xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
	PRIMARY KEY (at_ms, id),
	CONSTRAINT ledger_shape CHECK (CASE kind
		WHEN 'deposit' THEN balance_delta > 0 AND reserved_delta = 0 AND run_id IS NULL
		WHEN 'adjust' THEN balance_delta <> 0 AND reserved_delta = 0 AND run_id IS NULL
		WHEN 'reserve' THEN balance_delta = 0 AND reserved_delta >= 0 AND run_id IS NOT NULL
		WHEN 'charge' THEN balance_delta <= 0 AND reserved_delta = balance_delta AND run_id IS NOT NULL
		WHEN 'release' THEN balance_delta = 0 AND reserved_delta <= 0 AND run_id IS NOT NULL
		ELSE false END)
) PARTITION BY RANGE (at_ms);

CREATE FUNCTION eph_ledger_trap() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	RAISE EXCEPTION 'the ledger is insert only: % refused', TG_OP;
END $$;
CREATE TRIGGER ledger_trap BEFORE UPDATE OR DELETE ON ledger FOR EACH ROW EXECUTE FUNCTION eph_ledger_trap();
REVOKE UPDATE, DELETE, TRUNCATE ON ledger FROM PUBLIC, CURRENT_USER;

-- Where check-ledger got to: all rows with xid < horizon are summed in ledger_checkpoint_orgs.
CREATE TABLE ledger_checkpoint (
	one boolean PRIMARY KEY DEFAULT true CHECK (one),
	horizon xid8 NOT NULL,
	system_id text NOT NULL,
	at_ms bigint NOT NULL
);
CREATE TABLE ledger_checkpoint_orgs (
	org_id text PRIMARY KEY,
	balance bigint NOT NULL,
	reserved bigint NOT NULL
);

-- One row for each request with a key that succeeded.
CREATE TABLE idempotency (
	org_id text NOT NULL,
	endpoint text NOT NULL,
	key text NOT NULL,
	body_hash bytea NOT NULL,
	run_id text COLLATE "C" NOT NULL,
	expires_at_ms bigint NOT NULL,
	PRIMARY KEY (org_id, endpoint, key)
);
CREATE INDEX idempotency_expiry ON idempotency (expires_at_ms);

-- Callbacks to deliver, written by the transaction that settles; filled by a later part.
CREATE TABLE outbox (
	id text PRIMARY KEY,
	org_id text NOT NULL,
	run_id text COLLATE "C",
	endpoint text NOT NULL,
	body bytea NOT NULL,
	attempt integer NOT NULL DEFAULT 0,
	next_at_ms bigint NOT NULL,
	lease_until_ms bigint NOT NULL DEFAULT 0,
	done_at_ms bigint
);
CREATE INDEX outbox_due ON outbox (next_at_ms) WHERE done_at_ms IS NULL;
