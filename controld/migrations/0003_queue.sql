-- The queue, its clocks, and the nodes. Lock order of the whole schema: queue row, run_live row, then wallet (org_hot) or node;
-- equals by ascending id. A wallet and a node are never locked in one transaction.

CREATE TABLE queue_class (
	id smallint GENERATED ALWAYS AS IDENTITY PRIMARY KEY CHECK (id BETWEEN 1 AND 256),
	memory_mib integer NOT NULL,
	vcpus integer NOT NULL,
	selector text NOT NULL DEFAULT '',
	isolation text NOT NULL,                 -- 'kvm': only there; 'emulated': may also be emulated
	reserved_node integer,                   -- kept free for a run of this class that waited too long
	reserved_until_ms bigint NOT NULL DEFAULT 0,
	UNIQUE (memory_mib, vcpus, selector, isolation)
);

-- vt: of the last claim, raised at most every 50 ms. floor: what vt was 2 to 4 s ago; a claim looks no lower, so that it never
-- walks over the dead rows of a busy queue.
CREATE TABLE queue_clock (
	class_id smallint PRIMARY KEY REFERENCES queue_class,
	vt bigint NOT NULL DEFAULT 0,
	vt_at_ms bigint NOT NULL DEFAULT 0,
	floor bigint NOT NULL DEFAULT 0,
	floor_next bigint NOT NULL DEFAULT 0,
	floor_at_ms bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);

CREATE TABLE org_class (
	org_id text NOT NULL,
	class_id smallint NOT NULL,
	vt bigint NOT NULL,
	PRIMARY KEY (org_id, class_id)
) WITH (fillfactor = 50);

CREATE TABLE queue (
	run_id text COLLATE "C" PRIMARY KEY,
	org_id text NOT NULL,
	class_id smallint NOT NULL,
	vt bigint NOT NULL,
	ready boolean NOT NULL,
	avoid integer[] NOT NULL DEFAULT '{}'    -- numbers of nodes that failed it
);
CREATE INDEX queue_ready ON queue (class_id, vt, run_id) WHERE ready;
-- Both for promotion (not ready, by vt) and to count what an organization has queued.
CREATE INDEX queue_org ON queue (org_id, ready, vt);
-- Few: those that failed on some node.
CREATE INDEX queue_avoid ON queue (run_id) WHERE avoid <> '{}';

CREATE TABLE node_tokens (
	id text PRIMARY KEY,
	secret_hash bytea NOT NULL UNIQUE CHECK (length(secret_hash) = 32),
	uses_left bigint NOT NULL,
	expires_at_ms bigint NOT NULL,
	labels text NOT NULL DEFAULT '',
	isolation text NOT NULL,
	created_at_ms bigint NOT NULL
);

CREATE TABLE nodes (
	id text PRIMARY KEY,
	no integer GENERATED ALWAYS AS IDENTITY UNIQUE,
	name text NOT NULL,
	labels text NOT NULL DEFAULT '',
	isolation text NOT NULL,
	state text NOT NULL DEFAULT 'active',    -- active, draining, revoked
	sign_key bytea NOT NULL UNIQUE CHECK (length(sign_key) = 32),
	seal_key bytea NOT NULL CHECK (length(seal_key) = 32),
	receipt_key bytea NOT NULL CHECK (length(receipt_key) = 32),
	seal_sig bytea NOT NULL,
	receipt_sig bytea NOT NULL,
	certificate bytea,
	created_at_ms bigint NOT NULL
);

CREATE TABLE nodes_live (
	node_id text PRIMARY KEY REFERENCES nodes,
	epoch bigint NOT NULL DEFAULT 0,
	lease_until_ms bigint NOT NULL DEFAULT 0,
	seen_at_ms bigint NOT NULL DEFAULT 0,
	total_memory_mib integer NOT NULL DEFAULT 0, -- 0: has not spoken yet
	total_vcpus integer NOT NULL DEFAULT 0,
	total_slots integer NOT NULL DEFAULT 0,
	free_memory_mib integer NOT NULL DEFAULT 0,
	free_vcpus integer NOT NULL DEFAULT 0,
	free_slots integer NOT NULL DEFAULT 0,
	isolation text NOT NULL DEFAULT '',
	failed_in_row integer NOT NULL DEFAULT 0,
	probation_until_ms bigint NOT NULL DEFAULT 0,
	hold_until_ms bigint NOT NULL DEFAULT 0,     -- it refused a run: nothing for it before this
	command_seq bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 50);

-- Numbered by nodes_live.command_seq, whose row lock makes the order of numbers the order of commits.
CREATE TABLE node_commands (
	node_id text NOT NULL,
	id bigint NOT NULL,
	kind text NOT NULL,                      -- cancel, drain, undrain
	run_id text COLLATE "C",
	token bytea,
	created_at_ms bigint NOT NULL,
	PRIMARY KEY (node_id, id)
);

CREATE TABLE sweep_clock (
	one boolean PRIMARY KEY DEFAULT true CHECK (one),
	at_ms bigint NOT NULL,
	lease_floor_ms bigint NOT NULL DEFAULT 0 -- no lease counts as run out before this
) WITH (fillfactor = 50);
INSERT INTO sweep_clock (at_ms) VALUES (eph_now_ms());

-- Is there an enrolled node (p_live: that also holds a lease and takes work) that could run this class, but for those in p_avoid?
CREATE FUNCTION eph_servable(p_class smallint, p_live boolean, p_avoid integer[]) RETURNS boolean LANGUAGE sql STABLE AS $$
	SELECT EXISTS (
		SELECT 1 FROM queue_class c, nodes n JOIN nodes_live v ON v.node_id = n.id
		WHERE c.id = p_class AND n.state <> 'revoked' AND NOT n.no = ANY (p_avoid)
		AND (v.total_memory_mib = 0 OR (v.total_memory_mib >= c.memory_mib AND v.total_vcpus >= c.vcpus))
		AND (c.isolation = 'emulated' OR coalesce(nullif(v.isolation, ''), n.isolation) = 'kvm')
		AND (NOT p_live OR (n.state = 'active' AND v.lease_until_ms > eph_now_ms())))
$$;

CREATE FUNCTION eph_class(p_memory integer, p_vcpus integer, p_emulated boolean) RETURNS smallint LANGUAGE plpgsql AS $$
DECLARE
	v_isolation text := CASE WHEN p_emulated THEN 'emulated' ELSE 'kvm' END;
	v_id smallint;
BEGIN
	SELECT id INTO v_id FROM queue_class WHERE memory_mib = p_memory AND vcpus = p_vcpus AND selector = '' AND isolation = v_isolation;
	IF v_id IS NULL THEN
		INSERT INTO queue_class (memory_mib, vcpus, isolation) VALUES (p_memory, p_vcpus, v_isolation)
		ON CONFLICT (memory_mib, vcpus, selector, isolation) DO NOTHING;
		SELECT id INTO v_id FROM queue_class WHERE memory_mib = p_memory AND vcpus = p_vcpus AND selector = '' AND isolation = v_isolation;
		INSERT INTO queue_clock (class_id) VALUES (v_id) ON CONFLICT DO NOTHING;
	END IF;
	RETURN v_id;
END $$;

CREATE FUNCTION eph_command(p_node text, p_kind text, p_run text, p_token bytea, p_now bigint) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	v_id bigint;
BEGIN
	UPDATE nodes_live SET command_seq = command_seq + 1 WHERE node_id = p_node RETURNING command_seq INTO v_id;
	IF FOUND THEN
		INSERT INTO node_commands (node_id, id, kind, run_id, token, created_at_ms) VALUES (p_node, v_id, p_kind, p_run, p_token, p_now);
	END IF;
END $$;

-- Makes the organization's next runs ready while it has places. The caller holds the wallet's lock.
CREATE FUNCTION eph_promote(p_org text, p_max_running bigint) RETURNS TABLE (class_id smallint, promoted bigint) LANGUAGE plpgsql AS $$
DECLARE
	v_room bigint;
BEGIN
	SELECT coalesce(h.max_running, p_max_running) - h.admitted INTO v_room FROM org_hot h WHERE h.org_id = p_org;
	IF coalesce(v_room, 0) <= 0 THEN
		RETURN;
	END IF;
	RETURN QUERY
	WITH pick AS MATERIALIZED (
		SELECT q.run_id, q.class_id, k.vt FROM queue q JOIN queue_clock k ON k.class_id = q.class_id
		WHERE q.org_id = p_org AND NOT q.ready ORDER BY q.vt, q.run_id LIMIT v_room FOR UPDATE OF q SKIP LOCKED
	), up AS (
		UPDATE queue q SET ready = true, vt = greatest(q.vt, pick.vt) FROM pick WHERE q.run_id = pick.run_id RETURNING q.class_id
	), hot AS (
		UPDATE org_hot h SET admitted = admitted + (SELECT count(*) FROM up) WHERE h.org_id = p_org AND EXISTS (SELECT 1 FROM up)
	)
	SELECT up.class_id, count(*) FROM up GROUP BY up.class_id;
END $$;
