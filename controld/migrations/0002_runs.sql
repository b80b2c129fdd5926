-- Runs: what moves (run_live) apart from what stays. Everything with a run id as its first key is partitioned by it, a day a
-- partition, so that all of a run lies together and goes together.

CREATE TABLE runs (
	run_id text COLLATE "C" NOT NULL,
	org_id text NOT NULL,
	key_id text NOT NULL,
	member_id text NOT NULL DEFAULT '',
	status text NOT NULL DEFAULT 'queued',   -- stays 'queued' until an end; run_live has the moves between
	model text NOT NULL,
	size text NOT NULL,
	class_id smallint NOT NULL,
	memory_mib integer NOT NULL,
	vcpus integer NOT NULL,
	timeout_s integer NOT NULL,
	max_model_calls integer NOT NULL,
	shell boolean NOT NULL,
	zero_data_retention boolean NOT NULL,
	cap_micros bigint NOT NULL CHECK (cap_micros > 0),
	price bigint[] NOT NULL,                 -- in the order of struct price
	request_hash bytea NOT NULL,
	created_at_ms bigint NOT NULL,
	expires_at_ms bigint NOT NULL,
	-- set at the end
	started_at_ms bigint,
	ended_at_ms bigint,
	cancel_requested_at_ms bigint,
	error_code text,
	error_message text,
	usage bigint[],                          -- in the order of struct usage
	cost bigint[],                           -- run fee, compute, model, web: clamped, they add up to the charge
	cost_from_meter boolean NOT NULL DEFAULT false, -- no figures from the host: the last meter committed here
	attempt integer,
	node_id text,
	isolation text,
	token bytea,                             -- the last holder's, so that a repeated finish is known
	node_seq bigint,                         -- the host's last event
	node_hash bytea,
	image_hash bytea,
	receipt_signature bytea,
	-- set at settlement
	settled_at_ms bigint,
	released_micros bigint,
	head_seq bigint,
	head_hash bytea,
	PRIMARY KEY (run_id)
) PARTITION BY RANGE (run_id);
CREATE INDEX runs_org ON runs (org_id, run_id);
-- For lists by an end, of which there may be few among many.
CREATE INDEX runs_ended ON runs (org_id, status, run_id) WHERE ended_at_ms IS NOT NULL;

CREATE TABLE run_content (
	run_id text COLLATE "C" NOT NULL,
	prompt text NOT NULL,
	request text NOT NULL,                   -- canonical JSON, served as it is
	PRIMARY KEY (run_id)
) PARTITION BY RANGE (run_id);

-- Apart from run_content, so that the end of a run adds a row and rewrites no prompt.
CREATE TABLE run_output (
	run_id text COLLATE "C" NOT NULL,
	output bytea NOT NULL,
	PRIMARY KEY (run_id)
) PARTITION BY RANGE (run_id);

CREATE TABLE run_meta (
	org_id text NOT NULL,
	k text NOT NULL,
	v text NOT NULL,
	run_id text COLLATE "C" NOT NULL,
	PRIMARY KEY (org_id, k, v, run_id)
) PARTITION BY RANGE (run_id);
CREATE INDEX run_meta_run ON run_meta (run_id);

CREATE TABLE run_files (
	run_id text COLLATE "C" NOT NULL,
	position smallint NOT NULL,
	path text NOT NULL,
	size bigint NOT NULL,
	sha256 bytea NOT NULL,
	PRIMARY KEY (run_id, position)
) PARTITION BY RANGE (run_id);

CREATE TABLE events (
	run_id text COLLATE "C" NOT NULL,
	seq bigint NOT NULL,
	type text NOT NULL,
	bytes bytea NOT NULL,
	hash bytea NOT NULL,
	PRIMARY KEY (run_id, seq)
) PARTITION BY RANGE (run_id);

-- One row for each run that is not settled. Narrow, and no index on what changes but for the node, so that updates stay on the
-- page (HOT); the organization's index, for lists of what is queued or running, never changes. state: queued, claimed, running, ending, ended.
CREATE TABLE run_live (
	run_id text COLLATE "C" PRIMARY KEY,
	org_id text NOT NULL,
	state text NOT NULL,
	class_id smallint NOT NULL,
	attempt smallint NOT NULL DEFAULT 0,
	refusals smallint NOT NULL DEFAULT 0,
	admitted boolean NOT NULL DEFAULT true,  -- counted in org_hot.admitted; false only for what ended before it was ready
	timeout_s integer NOT NULL,
	node_id text,
	token bytea,
	seq bigint NOT NULL,
	hash bytea NOT NULL,
	event_bytes bigint NOT NULL DEFAULT 0,   -- of the host's events
	last_t_ms bigint NOT NULL DEFAULT 0,
	spent bigint NOT NULL DEFAULT 0,
	held bigint NOT NULL DEFAULT 0,
	cap_micros bigint NOT NULL,
	created_at_ms bigint NOT NULL,
	state_at_ms bigint NOT NULL,             -- when the state began
	seen_at_ms bigint NOT NULL DEFAULT 0,    -- when its node last spoke of it
	started_at_ms bigint,
	cancel_requested_at_ms bigint,
	avoid integer[] NOT NULL DEFAULT '{}'
) WITH (fillfactor = 50);
CREATE INDEX run_live_node ON run_live (node_id) WHERE node_id IS NOT NULL;
CREATE INDEX run_live_org ON run_live (org_id, run_id);

-- Ended and not settled.
CREATE TABLE settle_pending (
	run_id text COLLATE "C" PRIMARY KEY,
	ended_at_ms bigint NOT NULL
);

-- Contents of files, once an organization and hash, in pieces of 256 KiB. org_id '' is the system's own.
CREATE TABLE chunks (
	org_id text NOT NULL,
	sha256 bytea NOT NULL,
	position integer NOT NULL,
	data bytea NOT NULL CHECK (length(data) <= 262144),
	PRIMARY KEY (org_id, sha256, position)
);
ALTER TABLE chunks ALTER COLUMN data SET STORAGE EXTERNAL;
CREATE TABLE chunk_files (
	org_id text NOT NULL,
	sha256 bytea NOT NULL,
	size bigint NOT NULL,
	complete boolean NOT NULL,               -- every piece is there
	used_at_ms bigint NOT NULL,              -- last create that named it
	PRIMARY KEY (org_id, sha256)
);
CREATE INDEX chunk_files_used ON chunk_files (used_at_ms);

-- ---- partitions ----------------------------------------------------------------------------------------------------------

CREATE FUNCTION eph_run_bound(p_ms bigint) RETURNS text LANGUAGE sql IMMUTABLE AS $$
	SELECT 'run_' || lpad(to_hex(p_ms), 12, '0')
$$;
CREATE FUNCTION eph_run_ms(p_run text) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
	SELECT ('x' || substr(p_run, 5, 12))::bit(48)::bigint
$$;

-- Attaching takes a lock that lets readers and writers of the parent go on; CREATE ... PARTITION OF would not.
CREATE FUNCTION eph_partition_add(p_parent text, p_name text, p_from text, p_to text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
	IF to_regclass(p_name) IS NOT NULL THEN
		RETURN false;
	END IF;
	EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING INDEXES INCLUDING STORAGE)', p_name, p_parent);
	EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%s) TO (%s)', p_parent, p_name, p_from, p_to);
	RETURN true;
END $$;

-- Days from yesterday to a week ahead, months from the last to the one after next. Returns how many were made.
CREATE FUNCTION eph_partitions_make() RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
	v_now timestamp := timestamp 'epoch' + eph_now_ms() * interval '1 millisecond';
	v_day timestamp;
	v_from bigint;
	v_to bigint;
	v_parent text;
	v_made integer := 0;
BEGIN
	PERFORM pg_advisory_xact_lock(hashtext('ephemeral partitions'));
	FOR i IN -1..7 LOOP
		v_day := date_trunc('day', v_now) + i * interval '1 day';
		v_from := (extract(epoch FROM v_day) * 1000)::bigint;
		FOREACH v_parent IN ARRAY ARRAY['runs', 'run_content', 'run_output', 'run_meta', 'run_files', 'events'] LOOP
			IF eph_partition_add(v_parent, v_parent || '_' || to_char(v_day, 'YYYYMMDD'), quote_literal(eph_run_bound(v_from)),
					quote_literal(eph_run_bound(v_from + 86400000))) THEN
				v_made := v_made + 1;
			END IF;
		END LOOP;
	END LOOP;
	FOR i IN -1..2 LOOP
		v_day := date_trunc('month', v_now) + i * interval '1 month';
		v_from := (extract(epoch FROM v_day) * 1000)::bigint;
		v_to := (extract(epoch FROM v_day + interval '1 month') * 1000)::bigint;
		v_parent := 'ledger_' || to_char(v_day, 'YYYYMM');
		IF eph_partition_add('ledger', v_parent, v_from::text, v_to::text) THEN
			EXECUTE format('REVOKE UPDATE, DELETE, TRUNCATE ON %I FROM PUBLIC, CURRENT_USER', v_parent);
			EXECUTE format('CREATE TRIGGER ledger_truncate_trap BEFORE TRUNCATE ON %I EXECUTE FUNCTION eph_ledger_trap()', v_parent);
			v_made := v_made + 1;
		END IF;
	END LOOP;
	RETURN v_made;
END $$;
SELECT eph_partitions_make();

-- Day partitions of runs that still have to come, after today.
CREATE FUNCTION eph_partitions_ahead() RETURNS integer LANGUAGE sql STABLE AS $$
	SELECT count(*)::integer FROM generate_series(1, 60) AS i
	WHERE to_regclass('events_' || to_char(timestamp 'epoch' + (eph_now_ms() + i * 86400000::bigint) * interval '1 millisecond', 'YYYYMMDD')) IS NOT NULL
$$;

-- Partitions whose every run is past its retention, oldest first: the caller detaches them concurrently, then drops them. parent is NULL
-- for one that was detached and then not dropped.
CREATE FUNCTION eph_partitions_old(p_retention_ms bigint) RETURNS TABLE (parent text, name text, pending boolean) LANGUAGE sql STABLE AS $$
	SELECT p.relname::text, c.relname::text, coalesce(i.inhdetachpending, false)
	FROM pg_class c LEFT JOIN pg_inherits i ON i.inhrelid = c.oid LEFT JOIN pg_class p ON p.oid = i.inhparent
	CROSS JOIN LATERAL (SELECT (extract(epoch FROM to_date(right(c.relname, 8), 'YYYYMMDD') + 1) * 1000)::bigint AS until_ms) e
	WHERE c.relkind = 'r' AND c.relname ~ '^(runs|run_content|run_output|run_meta|run_files|events)_[0-9]{8}$'
	AND c.relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = 'runs'::regclass)
	AND e.until_ms + p_retention_ms < eph_now_ms()
	AND NOT EXISTS (SELECT 1 FROM run_live l WHERE l.run_id < eph_run_bound(e.until_ms))
	ORDER BY right(c.relname, 8), c.relname LIMIT 12
$$;

-- ---- control's own events -------------------------------------------------------------------------------------------------

-- The bytes of an event as proto/event.h says them. p_data is a whole JSON object, compact.
CREATE FUNCTION eph_event(p_run text, p_seq bigint, p_created_ms bigint, p_t_ms bigint, p_type text, p_data text)
RETURNS bytea LANGUAGE sql IMMUTABLE AS $$
	SELECT convert_to('{"run_id":"' || p_run || '","seq":' || p_seq || ',"at":"'
		|| to_char(timestamp 'epoch' + (p_created_ms + p_t_ms) * interval '1 millisecond', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')
		|| '","t":' || p_t_ms / 1000 || '.' || lpad((p_t_ms % 1000)::text, 3, '0')
		|| ',"source":"control","type":"' || p_type || '","data":' || p_data || '}', 'UTF8')
$$;

-- Appends one to a run whose run_live row the caller has locked.
CREATE FUNCTION eph_emit(p_run text, p_now bigint, p_type text, p_data text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	l run_live;
	v_t bigint;
	v_bytes bytea;
	v_hash bytea;
BEGIN
	SELECT * INTO l FROM run_live WHERE run_id = p_run;
	v_t := greatest(p_now - l.created_at_ms, l.last_t_ms, 0);
	v_bytes := eph_event(p_run, l.seq + 1, l.created_at_ms, v_t, p_type, p_data);
	v_hash := sha256(l.hash || v_bytes);
	INSERT INTO events (run_id, seq, type, bytes, hash) VALUES (p_run, l.seq + 1, p_type, v_bytes, v_hash);
	UPDATE run_live SET seq = l.seq + 1, hash = v_hash, last_t_ms = v_t WHERE run_id = p_run;
END $$;

CREATE FUNCTION eph_usage_json(u bigint[]) RETURNS text LANGUAGE sql IMMUTABLE AS $$
	SELECT '{"model_calls":' || u[1] || ',"input_tokens":' || u[2] || ',"cached_input_tokens":' || u[3] || ',"output_tokens":' || u[4]
		|| ',"total_tokens":' || u[2] + u[4] || ',"web_requests":' || u[5] || ',"web_searches":' || u[6] || ',"compute_ms":' || u[7] || '}'
$$;

CREATE FUNCTION eph_error_json(p_code text, p_message text) RETURNS text LANGUAGE sql STABLE AS $$
	SELECT '{"code":' || to_json(p_code) || ',"message":' || to_json(coalesce(nullif(p_message, ''), e.title, p_code))
		|| ',"remedy":' || to_json(coalesce(e.remedy, '')) || '}'
	FROM (SELECT 1) one LEFT JOIN error_codes e ON e.code = p_code
$$;
