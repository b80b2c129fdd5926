-- Hosts: labels and the selector of an organization, a host that says goodbye, hosts that were removed.
-- The functions are those of 0003, 0005, 0010 and 0012 once more.

ALTER TABLE organizations ADD COLUMN selector text NOT NULL DEFAULT '';  -- "a=b,c=d", sorted: its runs go to hosts that have all of these
ALTER TABLE nodes ADD COLUMN removed_at_ms bigint;                       -- revoked, and in no list any more; receipts still need the row
ALTER TABLE nodes_live ADD COLUMN stopped_at_ms bigint NOT NULL DEFAULT 0; -- it said goodbye then; it is stopped while its lease ends no later
CREATE INDEX organizations_selector ON organizations (selector) WHERE selector <> '';

-- ---- classes with a selector ---------------------------------------------------------------------------------------------------

CREATE OR REPLACE FUNCTION eph_servable(p_class smallint, p_live boolean, p_avoid integer[]) RETURNS boolean LANGUAGE sql STABLE AS $$
	SELECT EXISTS (
		SELECT 1 FROM queue_class c, nodes n JOIN nodes_live v ON v.node_id = n.id
		WHERE c.id = p_class AND n.state <> 'revoked' AND NOT n.no = ANY (p_avoid)
		AND string_to_array(n.labels, ',') @> string_to_array(c.selector, ',')
		AND (v.total_memory_mib = 0 OR (v.total_memory_mib >= c.memory_mib AND v.total_vcpus >= c.vcpus))
		AND (c.isolation = 'emulated' OR coalesce(nullif(v.isolation, ''), n.isolation) = 'kvm')
		AND (NOT p_live OR (n.state = 'active' AND v.lease_until_ms > eph_now_ms())))
$$;

-- A class with a selector is held by who uses it: eph_selector_sweep takes those away that nobody needs, and their numbers (129 to 256)
-- are given out again, so that operators who change their minds do not use them up.
CREATE FUNCTION eph_class(p_memory integer, p_vcpus integer, p_emulated boolean, p_selector text) RETURNS smallint LANGUAGE plpgsql AS $$
DECLARE
	v_isolation text := CASE WHEN p_emulated THEN 'emulated' ELSE 'kvm' END;
	v_id smallint;
BEGIN
	IF p_selector = '' THEN
		RETURN eph_class(p_memory, p_vcpus, p_emulated);
	END IF;
	SELECT id INTO v_id FROM queue_class WHERE memory_mib = p_memory AND vcpus = p_vcpus AND selector = p_selector AND isolation = v_isolation
	FOR KEY SHARE;
	IF v_id IS NULL THEN
		LOCK TABLE queue_class IN SHARE ROW EXCLUSIVE MODE;
		IF (SELECT count(*) FROM queue_class WHERE id > 128) >= 128 THEN
			PERFORM eph_selector_sweep(true);   -- sizes that were changed often
		END IF;
		INSERT INTO queue_class (id, memory_mib, vcpus, selector, isolation) OVERRIDING SYSTEM VALUE
		SELECT (SELECT min(g) FROM generate_series(129, 256) g WHERE NOT EXISTS (SELECT 1 FROM queue_class c WHERE c.id = g)),
			p_memory, p_vcpus, p_selector, v_isolation
		ON CONFLICT (memory_mib, vcpus, selector, isolation) DO NOTHING;
		SELECT id INTO v_id FROM queue_class WHERE memory_mib = p_memory AND vcpus = p_vcpus AND selector = p_selector AND isolation = v_isolation
		FOR KEY SHARE;
		INSERT INTO queue_clock (class_id) VALUES (v_id) ON CONFLICT DO NOTHING;
	END IF;
	RETURN v_id;
END $$;

-- Classes with a selector that no run is in: of selectors that no organization has any more, or all. The rows are locked by one statement
-- and looked at by the next, whose snapshot sees the runs of whoever held them.
CREATE FUNCTION eph_selector_sweep(p_all boolean) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	v_some smallint[];
	v_gone smallint[];
BEGIN
	SELECT array_agg(c.id) INTO v_some FROM (SELECT q.id FROM queue_class q WHERE q.selector <> '' AND (p_all
		OR NOT EXISTS (SELECT 1 FROM organizations o WHERE o.selector = q.selector AND o.selector <> '')) ORDER BY q.id FOR UPDATE SKIP LOCKED) c;
	SELECT array_agg(i) INTO v_gone FROM unnest(v_some) i WHERE NOT EXISTS (SELECT 1 FROM run_live l WHERE l.class_id = i);
	IF v_gone IS NOT NULL THEN
		DELETE FROM org_class WHERE class_id = ANY (v_gone);
		DELETE FROM queue_clock WHERE class_id = ANY (v_gone);
		DELETE FROM queue_class WHERE id = ANY (v_gone);
	END IF;
END $$;

-- As in 0005, with the organization's selector.
CREATE OR REPLACE FUNCTION eph_run_create(p_rows jsonb, p_max_queued bigint, p_max_running bigint, p_retention_ms bigint, p_key_ms bigint)
RETURNS TABLE (idx integer, result text, run_id text, created_at_ms bigint, needed bigint, available bigint, lim bigint, class_id smallint)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
	v_now bigint := eph_now_ms();
	v_prefix text := eph_run_bound(v_now);
	v_fresh text[] := '{}';       -- runs that hold a new idempotency row
	a_idx integer[] := '{}'; a_run text[] := '{}'; a_ready boolean[] := '{}'; a_vt bigint[] := '{}'; a_class smallint[] := '{}';
	o_idx integer[] := '{}'; o_result text[] := '{}'; o_run text[] := '{}'; o_created bigint[] := '{}';
	o_needed bigint[] := '{}'; o_available bigint[] := '{}'; o_lim bigint[] := '{}'; o_class smallint[] := '{}';
	r record;
	h org_hot;
	v_disabled boolean;
	v_selector text;
	v_org text := '';
	v_cls smallint;
	v_class_key text := '';
	v_servable boolean;
	v_judged smallint;            -- the class that v_servable is about
	v_vt bigint;
	v_result text;
	v_run text;
	v_created bigint;
	v_needed bigint;
	v_avail bigint;
	v_lim bigint;
	v_max_queued bigint;
	v_queued bigint;
BEGIN
	WITH made AS (
		INSERT INTO idempotency AS i (org_id, endpoint, key, body_hash, run_id, expires_at_ms)
		SELECT DISTINCT ON (x.org, x.ik) x.org, 'runs', x.ik, decode(x.ih, 'hex'), v_prefix || x.run, v_now + p_key_ms
		FROM jsonb_to_recordset(p_rows) AS x(idx integer, run text, org text, ik text, ih text)
		WHERE x.ik IS NOT NULL ORDER BY x.org, x.ik, x.idx
		ON CONFLICT (org_id, endpoint, key) DO UPDATE
			SET body_hash = EXCLUDED.body_hash, run_id = EXCLUDED.run_id, expires_at_ms = EXCLUDED.expires_at_ms
			WHERE i.expires_at_ms <= v_now
		RETURNING i.run_id
	)
	SELECT coalesce(array_agg(made.run_id), '{}') INTO v_fresh FROM made;

	-- New classes are made before any wallet is locked, in one order.
	PERFORM eph_class(c.mem, c.vcpus, c.emu, c.selector) FROM (SELECT DISTINCT x.mem, x.vcpus, x.emu, coalesce(g.selector, '') AS selector
		FROM jsonb_to_recordset(p_rows) AS x(org text, mem integer, vcpus integer, emu boolean) LEFT JOIN organizations g ON g.id = x.org
		ORDER BY 1, 2, 3, 4) c;

	FOR r IN
		SELECT x.*, i.body_hash AS seen_hash, i.run_id AS seen_run
		FROM jsonb_to_recordset(p_rows) AS x(idx integer, run text, org text, ik text, ih text, cap bigint, mem integer, vcpus integer, emu boolean)
		LEFT JOIN LATERAL (SELECT k.body_hash, k.run_id FROM idempotency k
			WHERE k.org_id = x.org AND k.endpoint = 'runs' AND k.key = x.ik LIMIT 1) i ON true -- by its index, however small the table was
		ORDER BY x.org, x.mem, x.vcpus, x.emu, x.idx
	LOOP
		v_run := v_prefix || r.run;
		v_created := v_now; v_needed := 0; v_avail := 0; v_lim := 0; v_result := NULL;
		IF r.ik IS NOT NULL AND r.seen_run IS DISTINCT FROM v_run THEN
			IF r.seen_run IS NULL OR r.seen_run = ANY (v_fresh) THEN
				v_result := 'again';
			ELSIF r.seen_hash = decode(r.ih, 'hex') THEN
				v_result := 'replayed'; v_run := r.seen_run; v_created := eph_run_ms(r.seen_run);
			ELSE
				v_result := 'mismatch';
			END IF;
		ELSE
			IF r.org <> v_org THEN
				IF v_org <> '' AND h.org_id IS NOT NULL THEN
					UPDATE org_hot SET reserved = h.reserved, admitted = h.admitted, open = h.open WHERE org_id = v_org;
					UPDATE org_class oc SET vt = v_vt WHERE oc.org_id = v_org AND oc.class_id = v_cls;
				END IF;
				v_org := r.org; v_class_key := '';
				SELECT * INTO h FROM org_hot w WHERE w.org_id = r.org FOR UPDATE;
				SELECT g.disabled, g.selector INTO v_disabled, v_selector FROM organizations g WHERE g.id = r.org;
				v_max_queued := coalesce(h.max_queued, p_max_queued);
				v_queued := 0;
				IF h.open >= v_max_queued THEN
					SELECT count(*) INTO v_queued FROM (SELECT 1 FROM queue q WHERE q.org_id = r.org LIMIT v_max_queued) n;
				ELSE
					v_queued := h.open; -- at least what is queued: enough until it reaches the limit, then counted below
				END IF;
			END IF;
			IF v_class_key <> r.mem || ' ' || r.vcpus || ' ' || r.emu THEN
				IF v_class_key <> '' AND h.org_id IS NOT NULL THEN
					UPDATE org_class oc SET vt = v_vt WHERE oc.org_id = v_org AND oc.class_id = v_cls;
				END IF;
				v_class_key := r.mem || ' ' || r.vcpus || ' ' || r.emu;
				v_cls := eph_class(r.mem, r.vcpus, r.emu, coalesce(v_selector, ''));
				IF v_cls IS DISTINCT FROM v_judged THEN
					v_servable := eph_servable(v_cls, false, '{}');
					v_judged := v_cls;
				END IF;
				IF h.org_id IS NOT NULL THEN
					INSERT INTO org_class (org_id, class_id, vt) VALUES (r.org, v_cls, 0) ON CONFLICT DO NOTHING;
					SELECT greatest(oc.vt, k.vt) INTO v_vt FROM org_class oc JOIN queue_clock k ON k.class_id = oc.class_id
					WHERE oc.org_id = r.org AND oc.class_id = v_cls;
				END IF;
			END IF;
			IF h.org_id IS NOT NULL AND v_queued >= v_max_queued THEN
				SELECT count(*) INTO v_queued FROM (SELECT 1 FROM queue q WHERE q.org_id = r.org LIMIT v_max_queued) n;
				v_queued := v_queued + (SELECT count(*) FROM unnest(a_run) WITH ORDINALITY u(id, n)
					JOIN jsonb_to_recordset(p_rows) AS x(idx integer, org text) ON x.idx = a_idx[u.n] WHERE x.org = r.org);
			END IF;
			IF h.org_id IS NULL OR v_disabled THEN
				v_result := 'disabled';
			ELSIF NOT v_servable THEN
				v_result := 'no_node';
			ELSIF v_queued >= v_max_queued THEN
				v_result := 'too_many_queued'; v_lim := v_max_queued;
			ELSIF NOT h.unlimited AND h.balance - h.reserved < r.cap THEN
				v_result := 'insufficient'; v_needed := r.cap; v_avail := h.balance - h.reserved;
			ELSE
				v_result := 'created';
				h.reserved := h.reserved + r.cap;
				h.open := h.open + 1;
				v_queued := v_queued + 1;
				v_vt := v_vt + 1;
				a_idx := a_idx || r.idx; a_run := a_run || v_run; a_vt := a_vt || v_vt; a_class := a_class || v_cls;
				a_ready := a_ready || (h.admitted < coalesce(h.max_running, p_max_running));
				IF h.admitted < coalesce(h.max_running, p_max_running) THEN
					h.admitted := h.admitted + 1;
				END IF;
			END IF;
			IF v_result <> 'created' AND r.ik IS NOT NULL THEN
				DELETE FROM idempotency i WHERE i.org_id = r.org AND i.endpoint = 'runs' AND i.key = r.ik AND i.run_id = v_run;
			END IF;
		END IF;
		o_idx := o_idx || r.idx; o_result := o_result || v_result; o_run := o_run || v_run; o_created := o_created || v_created;
		o_needed := o_needed || v_needed; o_available := o_available || v_avail; o_lim := o_lim || v_lim; o_class := o_class || v_cls;
	END LOOP;
	IF v_org <> '' AND h.org_id IS NOT NULL THEN
		UPDATE org_hot SET reserved = h.reserved, admitted = h.admitted, open = h.open WHERE org_id = v_org;
		UPDATE org_class oc SET vt = v_vt WHERE oc.org_id = v_org AND oc.class_id = v_cls;
	END IF;

	IF cardinality(a_idx) > 0 THEN
		INSERT INTO runs (run_id, org_id, key_id, member_id, model, size, class_id, memory_mib, vcpus, timeout_s, max_model_calls, shell,
			zero_data_retention, cap_micros, price, request_hash, created_at_ms, expires_at_ms)
		SELECT d.id, x.org, x.key, coalesce(x.member, ''), x.model, x.size, d.class, x.mem, x.vcpus, x.timeout, x.calls, x.shell, x.zdr, x.cap,
			x.price, decode(x.rh, 'hex'), v_now, v_now + p_retention_ms
		FROM unnest(a_idx, a_run, a_class) AS d(idx, id, class)
		JOIN jsonb_to_recordset(p_rows) AS x(idx integer, org text, key text, member text, model text, size text, mem integer, vcpus integer,
			timeout integer, calls integer, shell boolean, zdr boolean, cap bigint, price bigint[], rh text) ON x.idx = d.idx;

		INSERT INTO run_content (run_id, prompt, request)
		SELECT d.id, x.prompt, x.request FROM unnest(a_idx, a_run) AS d(idx, id)
		JOIN jsonb_to_recordset(p_rows) AS x(idx integer, prompt text, request text) ON x.idx = d.idx;

		INSERT INTO run_meta (org_id, k, v, run_id)
		SELECT x.org, m.key, m.value, d.id FROM unnest(a_idx, a_run) AS d(idx, id)
		JOIN jsonb_to_recordset(p_rows) AS x(idx integer, org text, meta jsonb) ON x.idx = d.idx CROSS JOIN jsonb_each_text(x.meta) m
		WHERE x.meta IS NOT NULL;

		INSERT INTO run_files (run_id, position, path, size, sha256)
		SELECT d.id, f.n, f.v ->> 'path', (f.v ->> 'size')::bigint, decode(f.v ->> 'sha256', 'hex')
		FROM unnest(a_idx, a_run) AS d(idx, id)
		JOIN jsonb_to_recordset(p_rows) AS x(idx integer, files jsonb) ON x.idx = d.idx
		CROSS JOIN jsonb_array_elements(x.files) WITH ORDINALITY AS f(v, n) WHERE x.files IS NOT NULL;

		INSERT INTO ledger (at_ms, org_id, run_id, kind, balance_delta, reserved_delta)
		SELECT v_now, x.org, d.id, 'reserve', 0, x.cap FROM unnest(a_idx, a_run) AS d(idx, id)
		JOIN jsonb_to_recordset(p_rows) AS x(idx integer, org text, cap bigint) ON x.idx = d.idx;

		WITH first AS (
			SELECT d.id, x.org, d.class, x.timeout, x.cap, eph_event(d.id, 1, v_now, 0, 'run.queued',
				'{"reserved_micros":' || x.cap || ',"model":' || to_json(x.model) || '}') AS bytes
			FROM unnest(a_idx, a_run, a_class) AS d(idx, id, class)
			JOIN jsonb_to_recordset(p_rows) AS x(idx integer, org text, model text, cap bigint, timeout integer) ON x.idx = d.idx
		), hashed AS (
			SELECT first.*, sha256(decode(repeat('00', 32), 'hex') || bytes) AS hash FROM first
		), event AS (
			INSERT INTO events (run_id, seq, type, bytes, hash) SELECT id, 1, 'run.queued', bytes, hash FROM hashed
		)
		INSERT INTO run_live (run_id, org_id, state, class_id, timeout_s, seq, hash, cap_micros, created_at_ms, state_at_ms)
		SELECT id, org, 'queued', class, timeout, 1, hash, cap, v_now, v_now FROM hashed;

		INSERT INTO queue (run_id, org_id, class_id, vt, ready)
		SELECT d.id, x.org, d.class, d.vt, d.ready FROM unnest(a_idx, a_run, a_class, a_vt, a_ready) AS d(idx, id, class, vt, ready)
		JOIN jsonb_to_recordset(p_rows) AS x(idx integer, org text) ON x.idx = d.idx;
	END IF;

	RETURN QUERY SELECT * FROM unnest(o_idx, o_result, o_run, o_created, o_needed, o_available, o_lim, o_class);
END $$;

-- As in 0012, likewise.
CREATE OR REPLACE FUNCTION eph_run_judge(p_org text, p_key text, p_hash bytea, p_cap bigint, p_memory integer, p_vcpus integer, p_emulated boolean,
	p_max_queued bigint) RETURNS TABLE (result text, run_id text, created_at_ms bigint, needed bigint, available bigint, lim bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
	v_now bigint := eph_now_ms();
	i idempotency;
	h org_hot;
	v_class smallint := eph_class(p_memory, p_vcpus, p_emulated, coalesce((SELECT o.selector FROM organizations o WHERE o.id = p_org), ''));
	v_lim bigint;
	v_result text := 'admissible';
BEGIN
	SELECT * INTO i FROM idempotency k WHERE k.org_id = p_org AND k.endpoint = 'runs' AND k.key = p_key AND k.expires_at_ms > v_now;
	IF i.run_id IS NOT NULL THEN
		IF i.body_hash = p_hash THEN
			RETURN QUERY SELECT 'replayed', i.run_id, eph_run_ms(i.run_id), 0::bigint, 0::bigint, 0::bigint;
		ELSE
			RETURN QUERY SELECT 'mismatch', '', v_now, 0::bigint, 0::bigint, 0::bigint;
		END IF;
		RETURN;
	END IF;
	SELECT * INTO h FROM org_hot w WHERE w.org_id = p_org;
	v_lim := coalesce(h.max_queued, p_max_queued);
	IF h.org_id IS NULL OR EXISTS (SELECT 1 FROM organizations o WHERE o.id = p_org AND o.disabled) THEN
		v_result := 'disabled';
	ELSIF NOT eph_servable(v_class, false, '{}') THEN
		v_result := 'no_node';
	ELSIF h.open >= v_lim AND (SELECT count(*) FROM (SELECT 1 FROM queue q WHERE q.org_id = p_org LIMIT v_lim) n) >= v_lim THEN
		v_result := 'too_many_queued';
	ELSIF NOT h.unlimited AND h.balance - h.reserved < p_cap THEN
		v_result := 'insufficient';
	END IF;
	RETURN QUERY SELECT v_result, '', v_now, p_cap, h.balance - h.reserved, v_lim;
END $$;

-- As in 0012, for a host's labels.
CREATE OR REPLACE FUNCTION eph_claim(p_node text, p_now bigint, p_want integer, p_memory integer, p_vcpus integer, p_slots integer,
	p_total_memory integer, p_total_vcpus integer, p_isolation text, p_tokens bytea) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
	v_no integer;
	v_labels text[];
	v_left integer := least(p_want, p_slots);
	v_memory integer := p_memory;
	v_vcpus integer := p_vcpus;
	v_all text[] := '{}';
	v_got text[];
	v_vt bigint;
	v_take integer;
	v_used integer := 0;
	c record;
BEGIN
	SELECT no, string_to_array(labels, ',') INTO v_no, v_labels FROM nodes WHERE id = p_node;
	FOR c IN
		SELECT qc.id, qc.memory_mib, qc.vcpus, qc.reserved_node, qc.reserved_until_ms, k.floor, head.run_id,
			count(*) OVER () - row_number() OVER (ORDER BY head.run_id) + 1 AS classes_left
		FROM queue_class qc JOIN queue_clock k ON k.class_id = qc.id
		CROSS JOIN LATERAL (
			SELECT q.run_id FROM queue q WHERE q.class_id = qc.id AND q.ready AND q.vt >= k.floor AND NOT v_no = ANY (q.avoid)
			AND NOT EXISTS (SELECT 1 FROM organizations o WHERE o.id = q.org_id AND o.disabled)
			ORDER BY q.vt, q.run_id LIMIT 1) head
		WHERE qc.memory_mib <= p_total_memory AND qc.vcpus <= p_total_vcpus AND (qc.isolation = 'emulated' OR p_isolation = 'kvm')
			AND v_labels @> string_to_array(qc.selector, ',')
		ORDER BY head.run_id
	LOOP
		EXIT WHEN v_left <= 0;
		v_take := least(v_left, v_memory / c.memory_mib, v_vcpus / c.vcpus);
		IF v_take <= 0 THEN
			-- It would fit here were the node emptier. After a minute one node is kept for it.
			IF eph_run_ms(c.run_id) < p_now - 60000 AND (c.reserved_node = v_no OR c.reserved_until_ms < p_now) THEN
				UPDATE queue_class SET reserved_node = v_no, reserved_until_ms = p_now + 60000
				WHERE id = c.id AND (reserved_node = v_no OR reserved_until_ms < p_now);
				EXIT WHEN FOUND;
			END IF;
			CONTINUE;
		END IF;
		v_take := least(v_take, greatest(1, ceil(v_left::numeric / c.classes_left)::integer));
		WITH pick AS MATERIALIZED (
			SELECT q.run_id FROM queue q WHERE q.class_id = c.id AND q.ready AND q.vt >= c.floor AND NOT v_no = ANY (q.avoid)
			AND NOT EXISTS (SELECT 1 FROM organizations o WHERE o.id = q.org_id AND o.disabled)
			ORDER BY q.vt, q.run_id LIMIT v_take FOR UPDATE SKIP LOCKED
		), gone AS (
			DELETE FROM queue q USING pick WHERE q.run_id = pick.run_id RETURNING q.run_id, q.vt
		)
		SELECT array_agg(run_id ORDER BY vt, run_id), max(vt) INTO v_got, v_vt FROM gone;
		CONTINUE WHEN v_got IS NULL;
		WITH moved AS (
			UPDATE run_live l SET state = 'claimed', node_id = p_node, token = substr(p_tokens, (v_used + g.n - 1)::integer * 16 + 1, 16),
				attempt = l.attempt + 1, state_at_ms = p_now, seen_at_ms = p_now, seq = l.seq + 1,
				last_t_ms = greatest(p_now - l.created_at_ms, l.last_t_ms, 0),
				hash = sha256(l.hash || eph_event(l.run_id, l.seq + 1, l.created_at_ms, greatest(p_now - l.created_at_ms, l.last_t_ms, 0),
					'run.claimed', eph_claim_json(p_node, l.attempt + 1)))
			FROM unnest(v_got) WITH ORDINALITY AS g(run_id, n) WHERE l.run_id = g.run_id
			RETURNING l.run_id, l.seq, l.created_at_ms, l.last_t_ms, l.hash, l.attempt
		)
		INSERT INTO events (run_id, seq, type, bytes, hash)
		SELECT run_id, seq, 'run.claimed', eph_event(run_id, seq, created_at_ms, last_t_ms, 'run.claimed',
			eph_claim_json(p_node, attempt)), hash FROM moved;
		UPDATE queue_clock SET vt = greatest(vt, v_vt), vt_at_ms = p_now,
			floor = CASE WHEN p_now - floor_at_ms >= 2000 THEN floor_next ELSE floor END,
			floor_next = CASE WHEN p_now - floor_at_ms >= 2000 THEN vt ELSE floor_next END,
			floor_at_ms = CASE WHEN p_now - floor_at_ms >= 2000 THEN p_now ELSE floor_at_ms END
		WHERE class_id = c.id AND (vt_at_ms <= p_now - 50 OR vt_at_ms > p_now) AND vt < v_vt;
		IF c.reserved_node = v_no THEN
			UPDATE queue_class SET reserved_node = NULL, reserved_until_ms = 0 WHERE id = c.id AND reserved_node = v_no;
		END IF;
		v_all := v_all || v_got;
		v_used := v_used + cardinality(v_got);
		v_left := v_left - cardinality(v_got);
		v_memory := v_memory - c.memory_mib * cardinality(v_got);
		v_vcpus := v_vcpus - c.vcpus * cardinality(v_got);
	END LOOP;
	RETURN v_all;
END $$;

-- Does a run wait that somebody may take? Asked when a host was woken and could not take what it was woken for.
CREATE FUNCTION eph_somebody_waits() RETURNS boolean LANGUAGE sql STABLE AS $$
	SELECT EXISTS (SELECT 1 FROM queue_class c JOIN queue_clock k ON k.class_id = c.id CROSS JOIN LATERAL (
		SELECT 1 FROM queue q WHERE q.class_id = c.id AND q.ready AND q.vt >= k.floor ORDER BY q.vt, q.run_id LIMIT 1) head)
$$;

-- ---- organizations -------------------------------------------------------------------------------------------------------------

-- p_selector NULL: unchanged. At most 16 selectors at a time, so that classes (a size, an isolation and a selector) stay below 256.
CREATE FUNCTION eph_org_update(p_id text, p_name text, p_disabled boolean, p_emulated boolean, p_unlimited boolean, p_model text, p_cost bigint,
	p_max_queued bigint, p_max_running bigint, p_selector text) RETURNS TABLE (result text, detail text) LANGUAGE plpgsql AS $$
DECLARE
	v_selector text;
BEGIN
	SELECT coalesce(string_agg(t, ',' ORDER BY t COLLATE "C"), '') INTO v_selector
	FROM (SELECT DISTINCT unnest(string_to_array(p_selector, ',')) AS t) x;
	IF v_selector <> '' AND NOT EXISTS (SELECT 1 FROM organizations o WHERE o.selector = v_selector AND o.selector <> '')
			AND (SELECT count(DISTINCT o.selector) FROM organizations o WHERE o.selector <> '' AND o.id <> p_id) >= 16 THEN
		RETURN QUERY SELECT 'limit', 'organizations may have 16 different selectors; use one of those again';
		RETURN;
	END IF;
	RETURN QUERY SELECT u.result, u.detail FROM eph_org_update(p_id, p_name, p_disabled, p_emulated, p_unlimited, p_model, p_cost, p_max_queued,
		p_max_running) u;
	IF p_selector IS NOT NULL THEN
		UPDATE organizations SET selector = v_selector WHERE id = p_id;
		PERFORM eph_selector_sweep(false);
	END IF;
END $$;

-- ---- hosts ---------------------------------------------------------------------------------------------------------------------

-- remove: a host that is revoked, or that is not there any more, is taken out of the lists; its key stays known as revoked.
CREATE OR REPLACE FUNCTION eph_node_act(p_node text, p_action text) RETURNS TABLE (result text, detail text) LANGUAGE plpgsql AS $$
DECLARE
	v_state text;
	v_removed bigint;
	v_new text := CASE p_action WHEN 'drain' THEN 'draining' WHEN 'undrain' THEN 'active' ELSE 'revoked' END;
BEGIN
	SELECT state, removed_at_ms INTO v_state, v_removed FROM nodes WHERE id = p_node FOR UPDATE;
	IF v_state IS NULL OR (v_removed IS NOT NULL AND p_action <> 'remove') THEN
		RETURN QUERY SELECT 'not_found', 'no node has the id ' || p_node;
	ELSIF v_state = 'revoked' AND v_new <> 'revoked' THEN
		RETURN QUERY SELECT 'conflict', 'the node is revoked; enrol it again with a new key';
	ELSIF p_action = 'remove' AND v_state <> 'revoked' AND EXISTS (SELECT 1 FROM nodes_live WHERE node_id = p_node AND lease_until_ms > eph_now_ms()) THEN
		RETURN QUERY SELECT 'conflict', 'the node still answers; stop it first (or revoke it, which ends its runs)';
	ELSE
		IF v_state <> v_new THEN
			UPDATE nodes SET state = v_new WHERE id = p_node;
			IF v_new <> 'revoked' THEN
				PERFORM eph_command(p_node, p_action, NULL, NULL, eph_now_ms());
			END IF;
		END IF;
		IF p_action = 'remove' AND v_removed IS NULL THEN
			UPDATE nodes SET removed_at_ms = eph_now_ms() WHERE id = p_node;
		END IF;
		RETURN QUERY SELECT 'done', '';
	END IF;
END $$;

-- A host stops, and holds nothing any more. Its process is fenced by the next epoch, so that a poll of it that is still parked
-- somewhere claims nothing and renews nothing.
CREATE FUNCTION eph_node_bye(p_node text, p_epoch bigint) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
	v_now bigint := eph_now_ms();
BEGIN
	UPDATE nodes_live SET epoch = p_epoch + 1, lease_until_ms = least(lease_until_ms, v_now), stopped_at_ms = v_now,
		free_memory_mib = 0, free_vcpus = 0, free_slots = 0
	WHERE node_id = p_node AND epoch <= p_epoch;
	RETURN FOUND;
END $$;
