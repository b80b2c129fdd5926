-- Settlement: charge and release, wallet, run.settled, capacity for the organization's next. Exactly once, because the run_live row
-- that it needs goes in the same transaction.

-- Of p_runs (NULL: whatever has waited longest) settles what has ended. kind 'settled': run_id; kind 'promoted': a class with runs that became ready.
CREATE FUNCTION eph_settle(p_runs text[], p_limit integer, p_max_running bigint)
RETURNS TABLE (kind text, run_id text, memory_mib integer, vcpus integer, emulated boolean, count bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
	v_now bigint := eph_now_ms();
	v_ids text[];
	v_org text;
	v_orgs text[];
BEGIN
	WITH mine AS MATERIALIZED (
		SELECT l.run_id FROM run_live l
		WHERE l.run_id IN (SELECT s.run_id FROM settle_pending s WHERE p_runs IS NULL OR s.run_id = ANY (p_runs) ORDER BY s.run_id LIMIT p_limit)
		AND l.state = 'ended' ORDER BY l.run_id FOR UPDATE SKIP LOCKED
	)
	SELECT array_agg(mine.run_id) INTO v_ids FROM mine;
	IF v_ids IS NULL THEN
		RETURN;
	END IF;
	SELECT array_agg(DISTINCT l.org_id ORDER BY l.org_id) INTO v_orgs FROM run_live l WHERE l.run_id = ANY (v_ids);
	PERFORM 1 FROM org_hot h WHERE h.org_id = ANY (v_orgs) ORDER BY h.org_id FOR UPDATE;

	WITH sums AS (
		SELECT l.org_id, sum(r.cost[1] + r.cost[2] + r.cost[3] + r.cost[4])::bigint AS charge, sum(r.cap_micros)::bigint AS cap,
			count(*) AS n, count(*) FILTER (WHERE l.admitted) AS places
		FROM run_live l JOIN runs r ON r.run_id = l.run_id WHERE l.run_id = ANY (v_ids) GROUP BY l.org_id
	)
	UPDATE org_hot h SET balance = h.balance - sums.charge, reserved = h.reserved - sums.cap, open = h.open - sums.n,
		admitted = h.admitted - sums.places FROM sums WHERE h.org_id = sums.org_id;

	WITH c AS (
		SELECT l.run_id, l.org_id, l.seq + 1 AS seq, l.hash, l.created_at_ms, greatest(v_now - l.created_at_ms, l.last_t_ms, 0) AS t, r.cost,
			r.cap_micros, r.cost[1] + r.cost[2] + r.cost[3] + r.cost[4] AS charge
		FROM run_live l JOIN runs r ON r.run_id = l.run_id WHERE l.run_id = ANY (v_ids)
	), e AS (
		SELECT c.*, eph_event(run_id, seq, created_at_ms, t, 'run.settled', '{"charged_micros":' || charge || ',"released_micros":'
			|| cap_micros - charge || ',"parts":{"run_fee_micros":' || cost[1] || ',"compute_micros":' || cost[2] || ',"model_micros":' || cost[3]
			|| ',"web_micros":' || cost[4] || '}}') AS bytes FROM c
	), h AS MATERIALIZED (
		SELECT e.*, sha256(hash || bytes) AS new_hash FROM e
	), charge AS (
		INSERT INTO ledger (at_ms, org_id, run_id, kind, balance_delta, reserved_delta) SELECT v_now, org_id, run_id, 'charge', -charge, -charge FROM h
	), release AS (
		INSERT INTO ledger (at_ms, org_id, run_id, kind, balance_delta, reserved_delta)
		SELECT v_now, org_id, run_id, 'release', 0, charge - cap_micros FROM h WHERE charge < cap_micros
	), event AS (
		INSERT INTO events (run_id, seq, type, bytes, hash) SELECT run_id, seq, 'run.settled', bytes, new_hash FROM h
	)
	UPDATE runs r SET settled_at_ms = v_now, released_micros = h.cap_micros - h.charge, head_seq = h.seq, head_hash = h.new_hash
	FROM h WHERE r.run_id = h.run_id;
	DELETE FROM run_live l WHERE l.run_id = ANY (v_ids);
	DELETE FROM settle_pending s WHERE s.run_id = ANY (v_ids);
	RETURN QUERY SELECT 'settled', u.id, NULL::integer, NULL::integer, NULL::boolean, 1::bigint FROM unnest(v_ids) AS u(id);
	FOREACH v_org IN ARRAY v_orgs LOOP
		RETURN QUERY SELECT 'promoted', NULL, c.memory_mib, c.vcpus, c.isolation = 'emulated', p.promoted
		FROM eph_promote(v_org, p_max_running) p JOIN queue_class c ON c.id = p.class_id;
	END LOOP;
END $$;

-- For when eph_settle failed: one run after the other, so that what is wrong with one holds up nobody else. kind 'failed': run_id.
CREATE FUNCTION eph_settle_each(p_limit integer, p_max_running bigint)
RETURNS TABLE (kind text, run_id text, memory_mib integer, vcpus integer, emulated boolean, count bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
	v_run text;
BEGIN
	FOR v_run IN SELECT p.run_id FROM (SELECT s.run_id FROM settle_pending s ORDER BY s.run_id LIMIT p_limit) p
			JOIN run_live l ON l.run_id = p.run_id ORDER BY l.org_id, l.run_id LOOP -- wallets are locked in their order
		BEGIN
			RETURN QUERY SELECT * FROM eph_settle(ARRAY[v_run], 1, p_max_running);
		EXCEPTION WHEN OTHERS THEN
			RETURN QUERY SELECT 'failed', v_run, NULL::integer, NULL::integer, NULL::boolean, 1::bigint;
		END;
	END LOOP;
END $$;
