-- What a disabled organization has queued does not start and ends; a host that the operator hides stands in no event; whether a run
-- would be taken, asked before its files are stored.

CREATE INDEX organizations_disabled ON organizations (id) WHERE disabled;

-- Who claimed a run, and for which time. With `hide_node` (a setting of each session, store.c) without the node.
CREATE FUNCTION eph_claim_json(p_node text, p_attempt integer) RETURNS text LANGUAGE sql STABLE AS $$
	SELECT CASE WHEN current_setting('ephemeral.hide_node', true) = 'on' THEN '{' ELSE '{"node":' || to_json(p_node) || ',' END
		|| '"attempt":' || p_attempt || '}'
$$;

-- As in 0007, without the runs of disabled organizations.
CREATE OR REPLACE FUNCTION eph_claim(p_node text, p_now bigint, p_want integer, p_memory integer, p_vcpus integer, p_slots integer,
	p_total_memory integer, p_total_vcpus integer, p_isolation text, p_tokens bytea) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
	v_no integer;
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
	SELECT no INTO v_no FROM nodes WHERE id = p_node;
	FOR c IN
		SELECT qc.id, qc.memory_mib, qc.vcpus, qc.reserved_node, qc.reserved_until_ms, k.floor, head.run_id,
			count(*) OVER () - row_number() OVER (ORDER BY head.run_id) + 1 AS classes_left
		FROM queue_class qc JOIN queue_clock k ON k.class_id = qc.id
		CROSS JOIN LATERAL (
			SELECT q.run_id FROM queue q WHERE q.class_id = qc.id AND q.ready AND q.vt >= k.floor AND NOT v_no = ANY (q.avoid)
			AND NOT EXISTS (SELECT 1 FROM organizations o WHERE o.id = q.org_id AND o.disabled)
			ORDER BY q.vt, q.run_id LIMIT 1) head
		WHERE qc.memory_mib <= p_total_memory AND qc.vcpus <= p_total_vcpus AND (qc.isolation = 'emulated' OR p_isolation = 'kvm')
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

-- As in 0006, with eph_claim_json.
CREATE OR REPLACE FUNCTION eph_requeue(p_run text, p_now bigint, p_reason text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	l run_live;
BEGIN
	SELECT * INTO l FROM run_live WHERE run_id = p_run;
	PERFORM eph_emit(p_run, p_now, 'run.requeued', left(eph_claim_json(l.node_id, l.attempt), -1) || ',"reason":' || to_json(p_reason) || '}');
	UPDATE run_live SET state = 'queued', state_at_ms = p_now, node_id = NULL, token = NULL, spent = 0, held = 0 WHERE run_id = p_run;
	INSERT INTO queue (run_id, org_id, class_id, vt, ready, avoid)
	SELECT l.run_id, l.org_id, l.class_id, k.vt, true, l.avoid FROM queue_clock k WHERE k.class_id = l.class_id;
END $$;

-- Queued runs of disabled organizations end. Takes rows in the order of the schema and skips what somebody holds, as every sweep.
CREATE FUNCTION eph_sweep_disabled(p_limit integer)
RETURNS TABLE (run_id text, outcome text, node_id text, memory_mib integer, vcpus integer, emulated boolean) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
	v_now bigint := eph_now_ms();
	q record;
BEGIN
	FOR q IN
		SELECT w.run_id FROM organizations o JOIN org_hot h ON h.org_id = o.id AND h.open > 0 JOIN queue w ON w.org_id = o.id
		WHERE o.disabled ORDER BY w.run_id LIMIT p_limit FOR UPDATE OF w SKIP LOCKED
	LOOP
		PERFORM 1 FROM run_live l WHERE l.run_id = q.run_id AND l.state = 'queued' FOR UPDATE;
		CONTINUE WHEN NOT FOUND;
		PERFORM eph_unqueue(q.run_id);
		PERFORM eph_end(q.run_id, v_now, 'cancelled', 'cancelled', 'The organization was disabled before the run started.', NULL, NULL);
		RETURN QUERY SELECT q.run_id, 'ended', NULL, NULL::integer, NULL::integer, NULL::boolean;
	END LOOP;
END $$;

-- What eph_run_create would say to one run now, without making it: replayed, mismatch, disabled, no_node, too_many_queued, insufficient
-- or admissible. Keeps nothing but the class; the create judges again.
CREATE FUNCTION eph_run_judge(p_org text, p_key text, p_hash bytea, p_cap bigint, p_memory integer, p_vcpus integer, p_emulated boolean,
	p_max_queued bigint) RETURNS TABLE (result text, run_id text, created_at_ms bigint, needed bigint, available bigint, lim bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
	v_now bigint := eph_now_ms();
	i idempotency;
	h org_hot;
	v_class smallint := eph_class(p_memory, p_vcpus, p_emulated);
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
