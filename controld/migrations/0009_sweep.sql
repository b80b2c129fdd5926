-- What time does to runs. Each sweep takes at most p_limit rows, skipping what somebody else holds, and returns the runs that it moved:
-- outcome 'ended' or 'requeued' (with the class, to wake a node), and the node whose commands changed, if any. 'waiting' moves nothing.

CREATE FUNCTION eph_sweep_clock(p_instance text, p_version text, p_schema integer, p_lease_ms bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	v_now bigint := eph_now_ms();
	v_gap bigint;
BEGIN
	SELECT v_now - at_ms INTO v_gap FROM sweep_clock FOR UPDATE;
	UPDATE sweep_clock SET at_ms = greatest(at_ms, v_now), lease_floor_ms = CASE WHEN v_gap > 5000 THEN v_now + p_lease_ms ELSE lease_floor_ms END;
	INSERT INTO binaries (instance, version, schema_version, seen_at_ms) VALUES (p_instance, p_version, p_schema, v_now)
	ON CONFLICT (instance) DO UPDATE SET seen_at_ms = EXCLUDED.seen_at_ms WHERE binaries.seen_at_ms < v_now - 10000;
	RETURN v_gap;
END $$;

CREATE FUNCTION eph_sweep_queue(p_age_ms bigint, p_max_running bigint, p_limit integer)
RETURNS TABLE (run_id text, outcome text, node_id text, memory_mib integer, vcpus integer, emulated boolean) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
	v_now bigint := eph_now_ms();
	q record;
	v_org text;
BEGIN
	FOR q IN SELECT w.run_id, w.class_id FROM queue w WHERE w.run_id < eph_run_bound(v_now - p_age_ms) ORDER BY w.run_id LIMIT p_limit FOR UPDATE SKIP LOCKED LOOP
		PERFORM 1 FROM run_live l WHERE l.run_id = q.run_id AND l.state = 'queued' FOR UPDATE;
		CONTINUE WHEN NOT FOUND;
		PERFORM eph_unqueue(q.run_id);
		PERFORM eph_end(q.run_id, v_now, 'failed', 'no_capacity', CASE WHEN eph_servable(q.class_id, true, '{}')
			THEN 'No host had room for this run within ' || p_age_ms / 1000 || ' s.'
			ELSE 'No host that could take this run was there within ' || p_age_ms / 1000 || ' s.' END, NULL, NULL);
		RETURN QUERY SELECT q.run_id, 'ended', NULL, NULL::integer, NULL::integer, NULL::boolean;
	END LOOP;
	-- Failed where it was tried, and for 10 s nobody else was there who could take it: it does not wait until it is too old.
	FOR q IN SELECT w.run_id FROM queue w WHERE w.avoid <> '{}' AND EXISTS (SELECT 1 FROM sweep_clock s WHERE s.lease_floor_ms <= v_now AND v_now - s.at_ms < 5000)
		AND (w.class_id, w.avoid) IN (SELECT x.class_id, x.avoid FROM queue x WHERE x.avoid <> '{}' GROUP BY 1, 2
			HAVING NOT eph_servable(x.class_id, true, x.avoid))
		AND EXISTS (SELECT 1 FROM run_live l WHERE l.run_id = w.run_id AND l.state = 'queued' AND l.state_at_ms < v_now - 10000)
		ORDER BY w.run_id LIMIT p_limit FOR UPDATE OF w SKIP LOCKED
	LOOP
		PERFORM 1 FROM run_live l WHERE l.run_id = q.run_id AND l.state = 'queued' FOR UPDATE;
		CONTINUE WHEN NOT FOUND;
		PERFORM eph_unqueue(q.run_id);
		PERFORM eph_end(q.run_id, v_now, 'failed', 'vm_start_failed', (SELECT convert_from(e.bytes, 'UTF8')::json->'data'->>'reason' FROM events e
			WHERE e.run_id = q.run_id AND e.type = 'run.requeued' ORDER BY e.seq DESC LIMIT 1), NULL, NULL);
		RETURN QUERY SELECT q.run_id, 'ended', NULL, NULL::integer, NULL::integer, NULL::boolean;
	END LOOP;
	-- What fell below the floor (a create that took long to commit, a row that the nodes of the moment avoid) is lifted to the clock.
	UPDATE queue w SET vt = low.vt FROM (
		SELECT x.run_id, k.vt FROM queue_clock k CROSS JOIN LATERAL (
			SELECT y.run_id FROM queue y WHERE y.class_id = k.class_id AND y.ready AND y.vt < k.floor LIMIT p_limit FOR UPDATE SKIP LOCKED) x
	) low WHERE w.run_id = low.run_id;
	-- Places that nobody took up (a promotion skipped a locked row, a limit was raised).
	FOR v_org IN
		SELECT h.org_id FROM org_hot h WHERE h.open > h.admitted AND h.admitted < coalesce(h.max_running, p_max_running)
		AND EXISTS (SELECT 1 FROM queue w WHERE w.org_id = h.org_id AND NOT w.ready) ORDER BY h.org_id LIMIT 100 FOR UPDATE OF h SKIP LOCKED
	LOOP
		RETURN QUERY SELECT NULL::text, 'requeued', NULL::text, c.memory_mib, c.vcpus, c.isolation = 'emulated'
		FROM eph_promote(v_org, p_max_running) p JOIN queue_class c ON c.id = p.class_id;
	END LOOP;
	-- Classes with runs that a host could take: hosts that had a reason not to (probation, a refusal, a lost hint) are asked again.
	RETURN QUERY SELECT NULL::text, 'waiting', NULL::text, c.memory_mib, c.vcpus, c.isolation = 'emulated'
	FROM queue_class c JOIN queue_clock k ON k.class_id = c.id
	WHERE EXISTS (SELECT 1 FROM queue w WHERE w.class_id = c.id AND w.ready AND w.vt >= k.floor);
END $$;

-- False while nothing may count as run out: the clock stood still (an outage of ours, nobody could tell us anything), and for a lease after.
CREATE FUNCTION eph_time_counts(p_now bigint) RETURNS boolean LANGUAGE sql STABLE AS $$
	SELECT s.lease_floor_ms <= p_now AND p_now - s.at_ms < 5000 FROM sweep_clock s
$$;

-- Nodes whose lease ran out (a node that is revoked counts at once).
CREATE FUNCTION eph_lost_nodes(p_now bigint, p_grace_ms bigint) RETURNS TABLE (node_id text, why text) LANGUAGE sql STABLE AS $$
	SELECT n.id, CASE WHEN n.state = 'revoked' THEN 'revoked' ELSE 'lost' END
	FROM nodes n JOIN nodes_live v ON v.node_id = n.id
	WHERE n.state = 'revoked' OR (v.lease_until_ms + p_grace_ms < p_now AND eph_time_counts(p_now))
$$;

CREATE FUNCTION eph_sweep_claimed(p_lease_ms bigint, p_grace_ms bigint, p_start_ms bigint, p_limit integer)
RETURNS TABLE (run_id text, outcome text, node_id text, memory_mib integer, vcpus integer, emulated boolean) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
	v_now bigint := eph_now_ms();
	v_counts boolean := eph_time_counts(v_now);
	l record;
	v_outcome text;
BEGIN
	FOR l IN
		SELECT r.run_id, r.node_id, r.class_id, lost.why FROM run_live r LEFT JOIN eph_lost_nodes(v_now, p_grace_ms) lost ON lost.node_id = r.node_id
		WHERE r.node_id IS NOT NULL AND r.state = 'claimed' AND (lost.node_id IS NOT NULL OR (v_counts AND r.state_at_ms + p_start_ms < v_now))
		ORDER BY r.run_id LIMIT p_limit FOR UPDATE OF r SKIP LOCKED
	LOOP
		v_outcome := eph_not_started(l.run_id, v_now, true, l.why IS NULL, 'vm_start_failed', CASE
			WHEN l.why = 'revoked' THEN 'The host was revoked before the run started there.'
			WHEN l.why = 'lost' THEN 'The host stopped answering before the run started there.'
			ELSE 'The host did not start the run within ' || p_start_ms / 1000 || ' s.' END);
		IF l.why IS NULL THEN
			PERFORM eph_node_failed(l.node_id, v_now);
		END IF;
		RETURN QUERY SELECT l.run_id, v_outcome, l.node_id, c.memory_mib, c.vcpus, c.isolation = 'emulated' FROM queue_class c WHERE c.id = l.class_id;
	END LOOP;
END $$;

-- Fences what a lost node holds, and what a live node has not spoken of for as long as it takes to be lost.
CREATE FUNCTION eph_sweep_lost(p_lease_ms bigint, p_grace_ms bigint, p_limit integer)
RETURNS TABLE (run_id text, outcome text, node_id text, memory_mib integer, vcpus integer, emulated boolean) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
	v_now bigint := eph_now_ms();
	v_counts boolean := eph_time_counts(v_now);
	l record;
BEGIN
	FOR l IN
		SELECT r.run_id, r.node_id, lost.why FROM run_live r LEFT JOIN eph_lost_nodes(v_now, p_grace_ms) lost ON lost.node_id = r.node_id
		WHERE r.node_id IS NOT NULL AND r.state IN ('running', 'ending') AND (lost.node_id IS NOT NULL
			OR (v_counts AND r.seen_at_ms + p_lease_ms + p_grace_ms < v_now))
		ORDER BY r.run_id LIMIT p_limit FOR UPDATE OF r SKIP LOCKED
	LOOP
		PERFORM eph_end(l.run_id, v_now, 'interrupted', 'node_lost', CASE
			WHEN l.why = 'revoked' THEN 'The host was revoked during the run.'
			WHEN l.why = 'lost' THEN 'The host stopped answering during the run.'
			ELSE 'The host does not know this run any more.' END, NULL, NULL);
		PERFORM eph_void(l.run_id);
		RETURN QUERY SELECT l.run_id, 'ended', l.node_id, NULL::integer, NULL::integer, NULL::boolean;
	END LOOP;
END $$;

-- A fenced run's token is worth nothing any more: the next word of its node about it is answered stale, and kill.
CREATE FUNCTION eph_void(p_run text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	UPDATE run_live SET token = NULL WHERE run_id = p_run;
	UPDATE runs SET token = NULL WHERE run_id = p_run;
END $$;

CREATE FUNCTION eph_sweep_ending(p_ending_ms bigint, p_cancel_ms bigint, p_slack_ms bigint, p_limit integer)
RETURNS TABLE (run_id text, outcome text, node_id text, memory_mib integer, vcpus integer, emulated boolean) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
	v_now bigint := eph_now_ms();
	l record;
BEGIN
	IF NOT eph_time_counts(v_now) THEN
		RETURN;    -- the hosts could not tell us how their runs ended
	END IF;
	FOR l IN
		SELECT r.run_id, r.node_id, r.state, r.cancel_requested_at_ms FROM run_live r
		WHERE r.node_id IS NOT NULL AND ((r.state = 'ending' AND r.state_at_ms + p_ending_ms < v_now)
			OR (r.state IN ('claimed', 'running') AND r.cancel_requested_at_ms + p_cancel_ms < v_now)
			OR (r.state = 'running' AND r.started_at_ms + r.timeout_s * 1000::bigint + p_slack_ms < v_now))
		ORDER BY r.run_id LIMIT p_limit FOR UPDATE SKIP LOCKED
	LOOP
		IF l.cancel_requested_at_ms IS NOT NULL THEN
			PERFORM eph_end(l.run_id, v_now, 'cancelled', 'cancelled', '', NULL, NULL);
		ELSIF l.state = 'ending' THEN
			PERFORM eph_end(l.run_id, v_now, 'interrupted', 'node_lost', 'The host destroyed the microVM and did not report how the run ended.', NULL, NULL);
		ELSE
			PERFORM eph_end(l.run_id, v_now, 'timed_out', 'timed_out', 'The host did not end the run at its timeout.', NULL, NULL);
		END IF;
		PERFORM eph_void(l.run_id);
		RETURN QUERY SELECT l.run_id, 'ended', l.node_id, NULL::integer, NULL::integer, NULL::boolean;
	END LOOP;
END $$;

-- Old rows of things that nobody will ask for, in batches. Returns how many went.
CREATE FUNCTION eph_sweep_expire(p_limit integer) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	v_now bigint := eph_now_ms();
	v_sum bigint := 0;
	v_n bigint;
	f record;
BEGIN
	DELETE FROM idempotency WHERE (org_id, endpoint, key) IN (
		SELECT org_id, endpoint, key FROM idempotency WHERE expires_at_ms < v_now LIMIT p_limit FOR UPDATE SKIP LOCKED);
	GET DIAGNOSTICS v_n = ROW_COUNT; v_sum := v_sum + v_n;
	DELETE FROM node_tokens WHERE expires_at_ms < v_now - 86400000;
	GET DIAGNOSTICS v_n = ROW_COUNT; v_sum := v_sum + v_n;
	DELETE FROM node_commands WHERE created_at_ms < v_now - 86400000;
	GET DIAGNOSTICS v_n = ROW_COUNT; v_sum := v_sum + v_n;
	DELETE FROM binaries WHERE seen_at_ms < v_now - 600000;
	-- A file that no run of the last day named: runs that are live longer than their queue age and timeout do not exist.
	FOR f IN SELECT org_id, sha256 FROM chunk_files WHERE used_at_ms < v_now - 86400000 AND org_id <> '' ORDER BY used_at_ms LIMIT 20 FOR UPDATE SKIP LOCKED LOOP
		DELETE FROM chunks WHERE org_id = f.org_id AND sha256 = f.sha256;
		DELETE FROM chunk_files WHERE org_id = f.org_id AND sha256 = f.sha256;
		v_sum := v_sum + 1;
	END LOOP;
	RETURN v_sum;
END $$;
