-- What a node asks: next (lease, meters, claims, commands), start, events, finish, refuse.

-- Takes up to p_want runs for a node, from the classes that fit what is free. Returns what was claimed.
CREATE FUNCTION eph_claim(p_node text, p_now bigint, p_want integer, p_memory integer, p_vcpus integer, p_slots integer,
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
					'run.claimed', '{"node":"' || p_node || '","attempt":' || l.attempt + 1 || '}'))
			FROM unnest(v_got) WITH ORDINALITY AS g(run_id, n) WHERE l.run_id = g.run_id
			RETURNING l.run_id, l.seq, l.created_at_ms, l.last_t_ms, l.hash, l.attempt
		)
		INSERT INTO events (run_id, seq, type, bytes, hash)
		SELECT run_id, seq, 'run.claimed', eph_event(run_id, seq, created_at_ms, last_t_ms, 'run.claimed',
			'{"node":"' || p_node || '","attempt":' || attempt || '}'), hash FROM moved;
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

-- First row: kind 'state' with result ok, unknown_node, revoked or old_epoch. Then 'assign' rows (what to execute, with content),
-- 'command' rows (id, what, run, token) and 'kill' rows (tokens that are not this node's any more).
CREATE FUNCTION eph_next(p_node text, p_epoch bigint, p_free_memory integer, p_free_vcpus integer, p_free_slots integer,
	p_total_memory integer, p_total_vcpus integer, p_total_slots integer, p_isolation text, p_draining boolean, p_last_command bigint,
	p_runs text[], p_tokens_held bytea, p_spent bigint[], p_held bigint[], p_want integer, p_tokens bytea, p_lease_ms bigint)
RETURNS TABLE (kind text, result text, run_id text, token bytea, command_id bigint, attempt integer, queued_at_ms bigint, age_ms bigint,
	next_seq bigint, prev_hash bytea, request_hash bytea, timeout_s integer, max_model_calls integer, memory_mib integer, vcpus integer,
	shell boolean, zdr boolean, cap bigint, price bigint[], prompt text, files text, model text, upstream text, base_url text,
	any_address boolean, limit_param text, max_output bigint, min_output bigint, per_byte bigint, overhead bigint, call_timeout bigint,
	sealed_key bytea, provider text) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
	v_now bigint := eph_now_ms();
	n record;
	v_isolation text;
	v_assign text[];
	v_again text[];
	v_memory integer := p_free_memory;
	v_vcpus integer := p_free_vcpus;
	v_slots integer := p_free_slots;
	v_want integer := p_want;
	v_here bigint;
	v_lost text[];
	v_lost_tokens bytea[];
BEGIN
	SELECT a.no, a.state, a.isolation, v.epoch, v.failed_in_row, v.probation_until_ms, v.hold_until_ms INTO n
	FROM nodes a JOIN nodes_live v ON v.node_id = a.id WHERE a.id = p_node;
	IF n.no IS NULL OR n.state = 'revoked' OR p_epoch < n.epoch THEN
		RETURN QUERY SELECT 'state', CASE WHEN n.no IS NULL THEN 'unknown_node' WHEN n.state = 'revoked' THEN 'revoked' ELSE 'old_epoch' END,
			NULL, NULL::bytea, NULL::bigint, NULL::integer, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bytea, NULL::bytea, NULL::integer,
			NULL::integer, NULL::integer, NULL::integer, NULL::boolean, NULL::boolean, NULL::bigint, NULL::bigint[], NULL, NULL, NULL, NULL, NULL,
			NULL::boolean, NULL, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bytea, NULL;
		RETURN;
	END IF;
	-- A node may be less than it enrolled as, never more.
	v_isolation := CASE WHEN n.isolation = 'kvm' AND p_isolation = 'kvm' THEN 'kvm' ELSE 'emulated' END;

	IF cardinality(p_runs) > 0 THEN
		PERFORM 1 FROM run_live l WHERE l.run_id = ANY (p_runs) AND l.node_id = p_node ORDER BY l.run_id FOR NO KEY UPDATE;
		WITH said AS MATERIALIZED (
			SELECT p_runs[i] AS run_id, substr(p_tokens_held, (i - 1) * 16 + 1, 16) AS token, p_spent[i] AS spent, p_held[i] AS held
			FROM generate_subscripts(p_runs, 1) i
		), known AS (
			UPDATE run_live l SET seen_at_ms = v_now, spent = greatest(l.spent, least(h.spent, l.cap_micros)),
				held = CASE WHEN h.spent >= l.spent THEN least(h.held, l.cap_micros) ELSE l.held END
			FROM said h WHERE l.run_id = h.run_id AND l.token = h.token AND l.node_id = p_node RETURNING l.run_id, l.token
		)
		SELECT array_agg(h.run_id), array_agg(h.token) INTO v_lost, v_lost_tokens FROM said h
		WHERE NOT EXISTS (SELECT 1 FROM known k WHERE k.run_id = h.run_id AND k.token = h.token);
	END IF;

	-- Claimed for this node, and it does not know: the answer that said so was lost.
	SELECT coalesce(array_agg(l.run_id ORDER BY l.run_id), '{}'), coalesce(sum(c.memory_mib), 0), coalesce(sum(c.vcpus), 0)
	INTO v_again, v_memory, v_vcpus
	FROM (SELECT l.run_id, l.class_id FROM run_live l WHERE l.node_id = p_node AND l.state = 'claimed' AND NOT l.run_id = ANY (p_runs)
		ORDER BY l.run_id LIMIT 16) l JOIN queue_class c ON c.id = l.class_id;
	v_memory := p_free_memory - v_memory;
	v_vcpus := p_free_vcpus - v_vcpus;
	v_slots := p_free_slots - cardinality(v_again);
	v_want := least(p_want, length(p_tokens) / 16) - cardinality(v_again);
	IF p_draining OR n.state <> 'active' OR n.hold_until_ms > v_now THEN
		v_want := 0;
	ELSIF n.failed_in_row >= 3 THEN
		-- Probation: one run at a time, after a pause.
		SELECT count(*) INTO v_here FROM run_live l WHERE l.node_id = p_node AND l.state <> 'ended';
		v_want := CASE WHEN v_here = 0 AND v_now >= n.probation_until_ms THEN least(v_want, 1) ELSE 0 END;
	END IF;
	v_assign := v_again;
	-- What it says is free is believed only next to what it holds here: a node that lies takes no more than the runs it has places for.
	IF v_want > 0 THEN
		SELECT least(v_slots, least(p_total_slots, 1024) - count(*)) INTO v_slots FROM run_live l WHERE l.node_id = p_node AND l.state <> 'ended';
	END IF;
	IF v_want > 0 AND v_slots > 0 THEN
		v_assign := v_assign || eph_claim(p_node, v_now, v_want, v_memory, v_vcpus, v_slots, p_total_memory, p_total_vcpus, v_isolation, p_tokens);
	END IF;

	UPDATE nodes_live v SET epoch = p_epoch, lease_until_ms = v_now + p_lease_ms, seen_at_ms = v_now, total_memory_mib = p_total_memory,
		total_vcpus = p_total_vcpus, total_slots = p_total_slots, free_memory_mib = p_free_memory, free_vcpus = p_free_vcpus,
		free_slots = p_free_slots, isolation = v_isolation
	WHERE v.node_id = p_node;
	DELETE FROM node_commands c WHERE c.node_id = p_node AND c.id <= p_last_command;
	-- A cancel that crossed the claim.
	PERFORM eph_command(p_node, 'cancel', l.run_id, l.token, v_now) FROM run_live l
	WHERE l.run_id = ANY (v_assign) AND l.cancel_requested_at_ms IS NOT NULL
	AND NOT EXISTS (SELECT 1 FROM node_commands c WHERE c.node_id = p_node AND c.run_id = l.run_id);

	RETURN QUERY SELECT 'state', 'ok', NULL, NULL::bytea, NULL::bigint, NULL::integer, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bytea,
		NULL::bytea, NULL::integer, NULL::integer, NULL::integer, NULL::integer, NULL::boolean, NULL::boolean, NULL::bigint, NULL::bigint[], NULL,
		NULL, NULL, NULL, NULL, NULL::boolean, NULL, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bytea, NULL;
	IF cardinality(v_assign) > 0 THEN
		RETURN QUERY SELECT 'assign', NULL, l.run_id, l.token, NULL::bigint, l.attempt::integer, l.created_at_ms, v_now - l.created_at_ms, l.seq + 1,
			l.hash, r.request_hash, r.timeout_s, r.max_model_calls, r.memory_mib, r.vcpus, r.shell, r.zero_data_retention, r.cap_micros, r.price,
			c.prompt, (SELECT string_agg(f.size || ' ' || encode(f.sha256, 'hex') || ' ' || f.path, E'\n' ORDER BY f.position)
				FROM run_files f WHERE f.run_id = l.run_id),
			r.model, m.upstream, p.base_url, p.any_address, m.limit_param, m.max_output_tokens, m.min_output_tokens, m.tokens_per_byte_milli,
			m.overhead_tokens, m.call_timeout_ms, p.sealed_key, p.name
		FROM run_live l JOIN runs r ON r.run_id = l.run_id JOIN run_content c ON c.run_id = l.run_id
		LEFT JOIN models m ON m.id = r.model LEFT JOIN providers p ON p.name = m.provider
		WHERE l.run_id = ANY (v_assign) AND l.node_id = p_node AND l.state = 'claimed' ORDER BY l.run_id;
	END IF;
	RETURN QUERY SELECT 'command', c.kind, c.run_id, c.token, c.id, NULL::integer, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bytea,
		NULL::bytea, NULL::integer, NULL::integer, NULL::integer, NULL::integer, NULL::boolean, NULL::boolean, NULL::bigint, NULL::bigint[], NULL,
		NULL, NULL, NULL, NULL, NULL::boolean, NULL, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bytea, NULL
	FROM node_commands c WHERE c.node_id = p_node ORDER BY c.id LIMIT 200;
	IF v_lost IS NOT NULL THEN
		RETURN QUERY SELECT 'kill', NULL, h.run_id, h.token, NULL::bigint, NULL::integer, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bytea,
			NULL::bytea, NULL::integer, NULL::integer, NULL::integer, NULL::integer, NULL::boolean, NULL::boolean, NULL::bigint, NULL::bigint[], NULL,
			NULL, NULL, NULL, NULL, NULL::boolean, NULL, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bigint, NULL::bytea, NULL
		FROM (SELECT v_lost[i] AS run_id, v_lost_tokens[i] AS token FROM generate_subscripts(v_lost, 1) i LIMIT 56) h
		-- What has been settled meanwhile is the node's to finish with.
		WHERE NOT EXISTS (SELECT 1 FROM runs r WHERE r.run_id = h.run_id AND r.token = h.token AND r.node_id = p_node);
	END IF;
END $$;

-- What a token is worth: applied (this is the holder), stale or unknown. Locks the run.
CREATE FUNCTION eph_fence(p_node text, p_run text, p_token bytea) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	v_holder boolean;
BEGIN
	SELECT coalesce(token = p_token AND node_id = p_node, false) INTO v_holder FROM run_live WHERE run_id = p_run FOR UPDATE;
	IF FOUND THEN
		RETURN CASE WHEN v_holder THEN 'applied' ELSE 'stale' END;
	END IF;
	SELECT coalesce(token = p_token AND node_id = p_node, false) INTO v_holder FROM runs WHERE run_id = p_run;
	IF FOUND THEN
		RETURN CASE WHEN v_holder THEN 'duplicate' ELSE 'stale' END;
	END IF;
	RETURN 'unknown';
END $$;

CREATE FUNCTION eph_start(p_node text, p_run text, p_token bytea) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	v_now bigint := eph_now_ms();
	v_fence text;
	l run_live;
BEGIN
	v_fence := eph_fence(p_node, p_run, p_token);
	SELECT * INTO l FROM run_live WHERE run_id = p_run;
	IF v_fence <> 'applied' THEN
		RETURN CASE v_fence WHEN 'duplicate' THEN 'stale' ELSE v_fence END;
	END IF;
	IF l.state <> 'claimed' THEN
		RETURN CASE WHEN l.state = 'ended' THEN 'stale' ELSE 'duplicate' END;
	END IF;
	IF (SELECT state FROM nodes WHERE id = p_node) = 'revoked' THEN
		RETURN 'stale';
	END IF;
	UPDATE run_live SET state = 'running', state_at_ms = v_now, started_at_ms = v_now, seen_at_ms = v_now,
		spent = least((SELECT price[1] FROM runs WHERE run_id = p_run), cap_micros) WHERE run_id = p_run;
	UPDATE nodes_live SET failed_in_row = 0, probation_until_ms = 0 WHERE node_id = p_node AND failed_in_row > 0;
	RETURN 'applied';
END $$;

-- Batches of events, at most one a run where it matters (equal runs are taken in order). Arrays have an entry a batch; p_types and
-- p_lens an entry a record, p_blob their bytes one after the other. expected: the next seq wanted.
CREATE FUNCTION eph_events(p_nodes text[], p_runs text[], p_tokens bytea, p_spent bigint[], p_held bigint[], p_first bigint[],
	p_counts integer[], p_last_t bigint[], p_types text[], p_lens integer[], p_blob bytea)
RETURNS TABLE (idx integer, fence text, expected bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
	v_now bigint := eph_now_ms();
	v_rec integer[] := '{}';    -- first record of each batch
	v_off integer[] := '{}';    -- and its offset in the blob
	v_record integer := 1;
	v_offset integer := 1;
	a_run text[] := '{}'; a_seq bigint[] := '{}'; a_type text[] := '{}'; a_bytes bytea[] := '{}'; a_hash bytea[] := '{}';
	b record;
	l run_live;
	v_fence text;
	v_skip bigint;
	v_hash bytea;
	v_bytes bytea;
	v_at integer;
	v_size bigint;
	v_destroyed boolean;
BEGIN
	FOR i IN 1..cardinality(p_runs) LOOP
		v_rec := v_rec || v_record;
		v_off := v_off || v_offset;
		FOR j IN v_record..v_record + p_counts[i] - 1 LOOP
			v_offset := v_offset + p_lens[j];
		END LOOP;
		v_record := v_record + p_counts[i];
	END LOOP;
	FOR b IN SELECT i AS i, p_runs[i] AS run FROM generate_subscripts(p_runs, 1) i ORDER BY p_runs[i] COLLATE "C", i LOOP
		v_fence := eph_fence(p_nodes[b.i], b.run, substr(p_tokens, (b.i - 1) * 16 + 1, 16));
		SELECT * INTO l FROM run_live WHERE run_id = b.run;
		IF v_fence = 'applied' AND l.state = 'claimed' THEN
			v_fence := 'stale';   -- nothing may be told of a run that was not granted its start
		ELSIF v_fence = 'applied' AND l.state = 'ended' THEN
			v_fence := 'duplicate';
		ELSIF v_fence = 'applied' AND (l.seq > 20200 OR l.event_bytes > 18874368) THEN
			v_fence := 'stale';   -- far over the bounds that its broker keeps: not a broker of ours
		END IF;
		IF v_fence <> 'applied' THEN
			RETURN QUERY SELECT b.i, v_fence, p_first[b.i] + p_counts[b.i];
			CONTINUE;
		END IF;
		IF p_first[b.i] > l.seq + 1 THEN
			RETURN QUERY SELECT b.i, 'gap', l.seq + 1;
			CONTINUE;
		END IF;
		v_skip := l.seq + 1 - p_first[b.i];
		v_hash := l.hash;
		v_size := 0;
		v_destroyed := false;
		v_at := v_off[b.i];
		FOR j IN 0..p_counts[b.i] - 1 LOOP
			IF j >= v_skip THEN
				v_bytes := substr(p_blob, v_at, p_lens[v_rec[b.i] + j]);
				v_hash := sha256(v_hash || v_bytes);
				v_size := v_size + length(v_bytes);
				a_run := a_run || b.run; a_seq := a_seq || p_first[b.i] + j; a_type := a_type || p_types[v_rec[b.i] + j];
				a_bytes := a_bytes || v_bytes; a_hash := a_hash || v_hash;
				v_destroyed := v_destroyed OR p_types[v_rec[b.i] + j] = 'microvm.destroyed';
			END IF;
			v_at := v_at + p_lens[v_rec[b.i] + j];
		END LOOP;
		UPDATE run_live SET
			seq = greatest(l.seq, p_first[b.i] + p_counts[b.i] - 1), hash = v_hash, event_bytes = event_bytes + v_size,
			last_t_ms = greatest(last_t_ms, p_last_t[b.i]), seen_at_ms = v_now,
			spent = greatest(spent, least(p_spent[b.i], cap_micros)),
			held = CASE WHEN p_spent[b.i] >= spent THEN least(p_held[b.i], cap_micros) ELSE held END,
			state = CASE WHEN v_destroyed THEN 'ending' ELSE state END,
			state_at_ms = CASE WHEN v_destroyed AND state <> 'ending' THEN v_now ELSE state_at_ms END
		WHERE run_id = b.run;
		RETURN QUERY SELECT b.i, CASE WHEN p_counts[b.i] > 0 AND v_skip >= p_counts[b.i] THEN 'duplicate' ELSE 'applied' END,
			greatest(l.seq, p_first[b.i] + p_counts[b.i] - 1) + 1;
	END LOOP;
	INSERT INTO events (run_id, seq, type, bytes, hash) SELECT * FROM unnest(a_run, a_seq, a_type, a_bytes, a_hash);
END $$;

-- p_usage and p_cost in the order of struct usage and struct cost without its total.
CREATE FUNCTION eph_finish(p_node text, p_run text, p_token bytea, p_status text, p_code text, p_message text, p_usage bigint[], p_cost bigint[],
	p_last_seq bigint, p_last_hash bytea, p_image_hash bytea, p_isolation text, p_signature bytea, p_output bytea)
RETURNS TABLE (fence text, expected bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
	v_now bigint := eph_now_ms();
	v_fence text;
	l run_live;
	v_same boolean;
BEGIN
	v_fence := eph_fence(p_node, p_run, p_token);
	SELECT * INTO l FROM run_live WHERE run_id = p_run;
	IF v_fence = 'applied' AND l.state = 'claimed' THEN
		v_fence := 'stale';
	ELSIF v_fence = 'applied' AND l.state = 'ended' THEN
		v_fence := 'duplicate';
	ELSIF v_fence = 'applied' AND l.seq < p_last_seq THEN
		RETURN QUERY SELECT 'gap', l.seq + 1;
		RETURN;
	END IF;
	IF v_fence <> 'applied' THEN
		RETURN QUERY SELECT v_fence, 0::bigint;
		RETURN;
	END IF;
	-- A receipt counts only for the chain that is stored here.
	SELECT e.hash = p_last_hash INTO v_same FROM events e WHERE e.run_id = p_run AND e.seq = p_last_seq;
	-- A node may have run it in less than it enrolled as, never in more.
	UPDATE runs SET isolation = CASE WHEN (SELECT n.isolation FROM nodes n WHERE n.id = p_node) = 'kvm' THEN nullif(p_isolation, '') ELSE 'emulated' END,
		node_seq = p_last_seq, node_hash = p_last_hash, image_hash = p_image_hash,
		receipt_signature = CASE WHEN v_same AND p_signature <> decode(repeat('00', 64), 'hex') THEN p_signature END
	WHERE run_id = p_run;
	PERFORM eph_end(p_run, v_now, p_status, p_code, p_message, p_usage, p_cost);
	IF length(p_output) > 0 OR p_status = 'succeeded' THEN
		INSERT INTO run_output (run_id, output) VALUES (p_run, p_output) ON CONFLICT DO NOTHING;
	END IF;
	RETURN QUERY SELECT 'applied', l.seq + 2;
END $$;

-- A run did not start on this node. Three in a row put it in probation, with a pause that doubles up to five minutes.
CREATE FUNCTION eph_node_failed(p_node text, p_now bigint) RETURNS void LANGUAGE sql AS $$
	UPDATE nodes_live SET failed_in_row = failed_in_row + 1,
		probation_until_ms = CASE WHEN failed_in_row >= 2 THEN p_now + least(5000 * 2 ^ least(failed_in_row - 2, 10), 300000)::bigint ELSE 0 END
	WHERE node_id = p_node
$$;

CREATE FUNCTION eph_refuse(p_node text, p_run text, p_token bytea, p_failed boolean, p_code text, p_reason text)
RETURNS TABLE (fence text, outcome text, memory_mib integer, vcpus integer, emulated boolean) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
	v_now bigint := eph_now_ms();
	v_fence text;
	v_outcome text;
	l run_live;
BEGIN
	v_fence := eph_fence(p_node, p_run, p_token);
	SELECT * INTO l FROM run_live WHERE run_id = p_run;
	IF v_fence = 'applied' AND l.state <> 'claimed' THEN
		v_fence := 'stale';    -- it was granted its start: only a finish ends it
	END IF;
	IF v_fence <> 'applied' THEN
		RETURN QUERY SELECT v_fence, NULL, NULL::integer, NULL::integer, NULL::boolean;
		RETURN;
	END IF;
	v_outcome := eph_not_started(p_run, v_now, p_failed, p_failed, p_code, p_reason);
	IF NOT p_failed THEN
		-- It had no room after all: it is asked again when it has looked about.
		UPDATE nodes_live SET hold_until_ms = v_now + 500 WHERE node_id = p_node;
	ELSE
		PERFORM eph_node_failed(p_node, v_now);
	END IF;
	RETURN QUERY SELECT 'applied', v_outcome, c.memory_mib, c.vcpus, c.isolation = 'emulated' FROM queue_class c WHERE c.id = l.class_id;
END $$;
