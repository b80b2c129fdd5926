-- The ends of runs. eph_end is the one setter of a terminal status; everything that ends a run comes through it with the run's
-- row locked. It leaves the run ended and not settled.
--
--   queued -> claimed -> running -> ending -> ended -> (settled: the run_live row is gone)
--     |         |  ^ requeue        |
--     +---------+--------> ended <--+

CREATE FUNCTION eph_end(p_run text, p_now bigint, p_status text, p_code text, p_message text, p_usage bigint[], p_cost bigint[])
RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	l run_live;
	v_cap bigint;
	v_fee bigint;
	v_cost bigint[] := p_cost;
	v_usage bigint[] := coalesce(p_usage, ARRAY[0, 0, 0, 0, 0, 0, 0, 0]::bigint[]);
	v_over bigint;
	v_cut bigint;
	v_from_meter boolean := false;
BEGIN
	SELECT * INTO l FROM run_live WHERE run_id = p_run;
	SELECT cap_micros, price[1] INTO v_cap, v_fee FROM runs WHERE run_id = p_run;
	IF v_cost IS NULL THEN
		-- No figures from a host: nothing before `running`, then the last meter committed here.
		IF l.state IN ('running', 'ending') THEN
			v_over := least(greatest(l.spent, 0) + greatest(l.held, 0), v_cap);
			v_cost := ARRAY[least(v_fee, v_over), 0, v_over - least(v_fee, v_over), 0];
			v_from_meter := true;
		ELSE
			v_cost := ARRAY[0, 0, 0, 0]::bigint[];
		END IF;
	END IF;
	FOR i IN 1..4 LOOP
		v_cost[i] := least(greatest(v_cost[i], 0), v_cap);
	END LOOP;
	v_over := v_cost[1] + v_cost[2] + v_cost[3] + v_cost[4] - v_cap;
	FOREACH v_cut IN ARRAY ARRAY[3, 4, 2, 1]::bigint[] LOOP -- model, web, compute, run fee
		IF v_over > 0 THEN
			v_over := v_over - v_cost[v_cut];
			v_cost[v_cut] := greatest(-v_over, 0);
		END IF;
	END LOOP;
	PERFORM eph_emit(p_run, p_now, 'run.' || p_status, '{' || CASE WHEN p_status = 'succeeded' THEN '' ELSE
		'"error":' || eph_error_json(p_code, p_message) || ',' END || '"usage":' || eph_usage_json(v_usage) || '}');
	UPDATE runs SET status = p_status, started_at_ms = l.started_at_ms, ended_at_ms = p_now, cancel_requested_at_ms = l.cancel_requested_at_ms,
		error_code = nullif(p_code, ''), error_message = CASE WHEN coalesce(p_code, '') <> '' THEN
			coalesce(nullif(p_message, ''), (SELECT title FROM error_codes WHERE code = p_code), p_code) END,
		usage = v_usage, cost = v_cost, cost_from_meter = v_from_meter, attempt = l.attempt, node_id = l.node_id, token = l.token,
		isolation = coalesce(runs.isolation, (SELECT coalesce(nullif(v.isolation, ''), n.isolation) FROM nodes n JOIN nodes_live v ON v.node_id = n.id
			WHERE n.id = l.node_id AND l.started_at_ms IS NOT NULL))
	WHERE run_id = p_run;
	UPDATE run_live SET state = 'ended', state_at_ms = p_now WHERE run_id = p_run;
	DELETE FROM node_commands WHERE node_id = l.node_id AND run_id = p_run;
	INSERT INTO settle_pending (run_id, ended_at_ms) VALUES (p_run, p_now);
END $$;

-- A queued run ends: takes its row from the queue (the caller locked it, then run_live) and says whether it had a place.
CREATE FUNCTION eph_unqueue(p_run text) RETURNS void LANGUAGE sql AS $$
	WITH gone AS (DELETE FROM queue WHERE run_id = p_run RETURNING ready)
	UPDATE run_live l SET admitted = gone.ready FROM gone WHERE l.run_id = p_run
$$;

-- Back to the queue, at its head: what waited once does not wait again.
CREATE FUNCTION eph_requeue(p_run text, p_now bigint, p_reason text) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
	l run_live;
BEGIN
	SELECT * INTO l FROM run_live WHERE run_id = p_run;
	PERFORM eph_emit(p_run, p_now, 'run.requeued', '{"node":' || to_json(l.node_id) || ',"attempt":' || l.attempt || ',"reason":' || to_json(p_reason) || '}');
	UPDATE run_live SET state = 'queued', state_at_ms = p_now, node_id = NULL, token = NULL, spent = 0, held = 0 WHERE run_id = p_run;
	INSERT INTO queue (run_id, org_id, class_id, vt, ready, avoid)
	SELECT l.run_id, l.org_id, l.class_id, k.vt, true, l.avoid FROM queue_clock k WHERE k.class_id = l.class_id;
END $$;

-- A claimed run did not start (the caller locked it): again elsewhere, or its end. p_counts: as one of three attempts; p_avoid: not there
-- again, and its end when no other live node could serve it. Returns requeued or ended.
CREATE FUNCTION eph_not_started(p_run text, p_now bigint, p_counts boolean, p_avoid boolean, p_code text, p_reason text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	l run_live;
	v_no integer;
BEGIN
	SELECT no INTO v_no FROM nodes WHERE id = (SELECT node_id FROM run_live WHERE run_id = p_run);
	UPDATE run_live SET attempt = CASE WHEN p_counts THEN attempt ELSE greatest(attempt - 1, 0) END,
		refusals = CASE WHEN p_counts THEN refusals ELSE refusals + 1 END,
		avoid = CASE WHEN v_no IS NOT NULL AND p_avoid AND NOT v_no = ANY (avoid) THEN avoid || v_no ELSE avoid END
	WHERE run_id = p_run RETURNING * INTO l;
	IF l.cancel_requested_at_ms IS NOT NULL THEN
		PERFORM eph_end(p_run, p_now, 'cancelled', 'cancelled', '', NULL, NULL);
		RETURN 'ended';
	END IF;
	IF l.attempt >= 3 OR (cardinality(l.avoid) > 0 AND NOT eph_servable(l.class_id, true, l.avoid)) THEN
		PERFORM eph_end(p_run, p_now, 'failed', p_code, p_reason, NULL, NULL);
		RETURN 'ended';
	END IF;
	PERFORM eph_requeue(p_run, p_now, p_reason);
	RETURN 'requeued';
END $$;

CREATE FUNCTION eph_cancel(p_org text, p_run text) RETURNS TABLE (result text, node_id text) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
	l run_live;
	v_now bigint := eph_now_ms();
BEGIN
	PERFORM 1 FROM queue q WHERE q.run_id = p_run FOR UPDATE;
	SELECT * INTO l FROM run_live WHERE run_live.run_id = p_run FOR UPDATE;
	IF l.run_id IS NULL THEN
		RETURN QUERY SELECT CASE WHEN EXISTS (SELECT 1 FROM runs r WHERE r.run_id = p_run AND r.org_id = p_org AND r.expires_at_ms > v_now)
			THEN 'already' ELSE 'not_found' END, NULL::text;
		RETURN;
	END IF;
	IF l.org_id <> p_org THEN
		RETURN QUERY SELECT 'not_found', NULL::text;
		RETURN;
	END IF;
	IF l.state = 'ended' OR l.cancel_requested_at_ms IS NOT NULL THEN
		RETURN QUERY SELECT 'already', NULL::text;
		RETURN;
	END IF;
	UPDATE run_live SET cancel_requested_at_ms = v_now WHERE run_id = p_run;
	IF l.state = 'queued' THEN
		PERFORM eph_unqueue(p_run);
		PERFORM eph_emit(p_run, v_now, 'run.cancel_requested', '{}');
		PERFORM eph_end(p_run, v_now, 'cancelled', 'cancelled', 'The run was cancelled before it started.', NULL, NULL);
		RETURN QUERY SELECT 'ended', NULL::text;
		RETURN;
	END IF;
	PERFORM eph_command(l.node_id, 'cancel', p_run, l.token, v_now);
	RETURN QUERY SELECT 'requested', l.node_id;
END $$;
