-- Hosts that lie, drop what they are given, or speak when they were fenced; a clock that goes back; what check-ledger reads again.
-- The functions are those of 0006, 0007, 0009 and 0010 once more.

-- ---- tables --------------------------------------------------------------------------------------------------------------------

ALTER TABLE runs ADD CONSTRAINT runs_cap_bounded CHECK (cap_micros <= 1000000000000000); -- so that the sums of a run never overflow
ALTER TABLE runs ADD COLUMN void_token bytea;     -- the last holder's token after it was fenced, so that late reports are known
ALTER TABLE run_live ADD COLUMN offers smallint NOT NULL DEFAULT 0;      -- how often this claim was sent to its node again
ALTER TABLE run_live ADD COLUMN offer_after_ms bigint NOT NULL DEFAULT 0; -- not again before this

-- What a fenced host still said of a run that was over here: its use is known and charged to nobody. One row a run, however often
-- the host repeats itself; only the last holder of the run's token makes one. Kept for a year.
CREATE TABLE late_reports (
	run_id text COLLATE "C" PRIMARY KEY,
	org_id text NOT NULL,
	node_id text NOT NULL,
	first_at_ms bigint NOT NULL,
	last_at_ms bigint NOT NULL,
	reports bigint NOT NULL DEFAULT 1,
	used_micros bigint NOT NULL,             -- the highest that it said, at most the run's cap
	charged_micros bigint NOT NULL
);
CREATE INDEX late_reports_age ON late_reports (first_at_ms);

-- Pieces of the ledger that were whole when check-ledger made a checkpoint: rows with from_xid <= xid < to_xid, their digest, and a
-- chain over it and the piece before. Rows of old pieces are read again from time to time, oldest look first; --full reads all.
CREATE TABLE ledger_pieces (
	n bigint PRIMARY KEY,
	from_xid xid8 NOT NULL,
	to_xid xid8 NOT NULL,
	rows bigint NOT NULL,
	digest bytea NOT NULL,
	chain bytea NOT NULL,
	looked_at_ms bigint NOT NULL
);
CREATE INDEX ledger_pieces_look ON ledger_pieces (looked_at_ms, n);
CREATE INDEX ledger_xid ON ledger (xid);

-- In groups of a thousand, so that no text grows with the ledger.
CREATE FUNCTION eph_ledger_digest(p_from xid8, p_to xid8) RETURNS TABLE (rows bigint, digest bytea) LANGUAGE sql STABLE AS $$
	SELECT coalesce(sum(g.n), 0)::bigint, sha256(coalesce(string_agg(g.hash, ''::bytea ORDER BY g.part), ''::bytea)) FROM (
		SELECT t.part, count(*) AS n, sha256(convert_to(string_agg(t.line, E'\n' ORDER BY t.id, t.line), 'UTF8')) AS hash FROM (
			SELECT l.id, l.id / 1000 AS part, concat_ws('|', l.id, l.at_ms, l.org_id, coalesce(l.run_id, ''), l.kind, l.balance_delta,
				l.reserved_delta, coalesce(md5(l.note), ''), l.xid) AS line
			FROM ledger l WHERE l.xid >= p_from AND l.xid < p_to) t GROUP BY t.part) g
$$;

-- ---- what hosts say ------------------------------------------------------------------------------------------------------------

-- A word about a run that was fenced, from the host that held it last: what it used by then is money that nobody pays. Kept, once a run.
CREATE FUNCTION eph_late(p_node text, p_run text, p_token bytea, p_used bigint, p_now bigint) RETURNS void LANGUAGE sql AS $$
	INSERT INTO late_reports AS l (run_id, org_id, node_id, first_at_ms, last_at_ms, used_micros, charged_micros)
	SELECT r.run_id, r.org_id, p_node, p_now, p_now, least(greatest(p_used, 0), r.cap_micros), r.cost[1] + r.cost[2] + r.cost[3] + r.cost[4]
	FROM runs r WHERE r.run_id = p_run AND r.node_id = p_node AND r.void_token = p_token AND r.cost IS NOT NULL
	ON CONFLICT (run_id) DO UPDATE SET last_at_ms = p_now, reports = l.reports + 1, used_micros = greatest(l.used_micros, EXCLUDED.used_micros)
$$;

CREATE OR REPLACE FUNCTION eph_next(p_node text, p_epoch bigint, p_free_memory integer, p_free_vcpus integer, p_free_slots integer,
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

	-- Claimed for this node, and it does not know: the answer that said so was lost. Sent again at once, then with pauses that double:
	-- a node that drops what it gets does not make a circle of it. eph_sweep_claimed ends what was sent in vain too often.
	SELECT coalesce(array_agg(l.run_id ORDER BY l.run_id) FILTER (WHERE l.offer_after_ms <= v_now AND l.offers < 7), '{}'), coalesce(sum(c.memory_mib), 0),
		coalesce(sum(c.vcpus), 0), count(*)
	INTO v_again, v_memory, v_vcpus, v_here
	FROM (SELECT l.run_id, l.class_id, l.offers, l.offer_after_ms FROM run_live l WHERE l.node_id = p_node AND l.state = 'claimed' AND NOT l.run_id = ANY (p_runs)
		ORDER BY l.run_id LIMIT 16) l JOIN queue_class c ON c.id = l.class_id;
	UPDATE run_live l SET offers = l.offers + 1, offer_after_ms = v_now + least(250 * 2 ^ l.offers, 15000)::bigint
	WHERE l.run_id = ANY (v_again) AND l.node_id = p_node AND l.state = 'claimed';
	v_memory := greatest(p_free_memory, 0) - v_memory;
	v_vcpus := greatest(p_free_vcpus, 0) - v_vcpus;
	v_slots := greatest(p_free_slots, 0) - v_here;
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
		PERFORM eph_late(p_node, p_runs[i], substr(p_tokens_held, (i - 1) * 16 + 1, 16), least(p_spent[i], 1000000000000000) + least(p_held[i], 1000000000000000), v_now)
		FROM generate_subscripts(p_runs, 1) i WHERE p_runs[i] = ANY (v_lost) ORDER BY p_runs[i] COLLATE "C";
	END IF;
END $$;

CREATE OR REPLACE FUNCTION eph_events(p_nodes text[], p_runs text[], p_tokens bytea, p_spent bigint[], p_held bigint[], p_first bigint[],
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
		ELSIF v_fence = 'applied' AND p_last_t[b.i] > greatest(l.started_at_ms - l.created_at_ms, 0) + l.timeout_s * 1000::bigint + 600000 THEN
			v_fence := 'stale';   -- a time that no run of this timeout reaches
		ELSIF v_fence = 'applied' AND p_counts[b.i] > 0 AND p_first[b.i] <= l.seq + 1 AND ((l.state = 'ending' AND p_first[b.i] + p_counts[b.i] > l.seq + 1)
				OR 'microvm.destroyed' = ANY (p_types[v_rec[b.i]:v_rec[b.i] + p_counts[b.i] - 2])) THEN
			v_fence := 'stale';   -- of a VM that it said is destroyed
		END IF;
		IF v_fence <> 'applied' THEN
			IF v_fence = 'stale' THEN
				PERFORM eph_late(p_nodes[b.i], b.run, substr(p_tokens, (b.i - 1) * 16 + 1, 16), least(p_spent[b.i], 1000000000000000) + least(p_held[b.i], 1000000000000000), v_now);
			END IF;
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
CREATE OR REPLACE FUNCTION eph_finish(p_node text, p_run text, p_token bytea, p_status text, p_code text, p_message text, p_usage bigint[], p_cost bigint[],
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
	ELSIF v_fence = 'applied' AND l.state <> 'ending' THEN
		-- Every end of ours comes after the VM is gone. What else it says is not believed, and the VM is ordered killed.
		PERFORM eph_end(p_run, v_now, 'interrupted', 'node_lost', 'The host reported an end without having destroyed the microVM.', NULL, NULL);
		PERFORM eph_void(p_run);
		v_fence := 'stale';
	END IF;
	IF v_fence <> 'applied' THEN
		IF v_fence = 'stale' THEN
			PERFORM eph_late(p_node, p_run, p_token, (SELECT least(sum(least(greatest(c, 0), 1000000000000000)), 1000000000000000)::bigint
				FROM unnest(p_cost) c), v_now);
		END IF;
		RETURN QUERY SELECT v_fence, 0::bigint;
		RETURN;
	END IF;
	-- A receipt counts only for the whole chain that is stored here.
	SELECT e.hash = p_last_hash AND e.seq = l.seq INTO v_same FROM events e WHERE e.run_id = p_run AND e.seq = p_last_seq;
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

-- ---- starts that were none, and what time does ------------------------------------------------------------------------------------

CREATE OR REPLACE FUNCTION eph_not_started(p_run text, p_now bigint, p_counts boolean, p_avoid boolean, p_code text, p_reason text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	l run_live;
	v_no integer;
BEGIN
	SELECT no INTO v_no FROM nodes WHERE id = (SELECT node_id FROM run_live WHERE run_id = p_run);
	UPDATE run_live SET attempt = CASE WHEN p_counts THEN attempt ELSE greatest(attempt - 1, 0) END,
		offers = 0, offer_after_ms = 0,
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

-- A fenced run's token is worth nothing any more: the next word of its node about it is answered stale, and kill.
CREATE OR REPLACE FUNCTION eph_void(p_run text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	UPDATE run_live SET token = NULL WHERE run_id = p_run;
	UPDATE runs SET token = NULL, void_token = coalesce(token, void_token) WHERE run_id = p_run;
END $$;

CREATE OR REPLACE FUNCTION eph_sweep_claimed(p_lease_ms bigint, p_grace_ms bigint, p_start_ms bigint, p_limit integer)
RETURNS TABLE (run_id text, outcome text, node_id text, memory_mib integer, vcpus integer, emulated boolean) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
	v_now bigint := eph_now_ms();
	v_counts boolean := eph_time_counts(v_now);
	l record;
	v_outcome text;
BEGIN
	FOR l IN
		SELECT r.run_id, r.node_id, r.class_id, r.offers, lost.why FROM run_live r LEFT JOIN eph_lost_nodes(v_now, p_grace_ms) lost ON lost.node_id = r.node_id
		WHERE r.node_id IS NOT NULL AND r.state = 'claimed' AND (lost.node_id IS NOT NULL OR (v_counts AND r.state_at_ms + p_start_ms < v_now)
			OR (r.offers >= 7 AND r.offer_after_ms < v_now))
		ORDER BY r.run_id LIMIT p_limit FOR UPDATE OF r SKIP LOCKED
	LOOP
		v_outcome := eph_not_started(l.run_id, v_now, true, l.why IS NULL, 'vm_start_failed', CASE
			WHEN l.why = 'revoked' THEN 'The host was revoked before the run started there.'
			WHEN l.why = 'lost' THEN 'The host stopped answering before the run started there.'
			WHEN l.offers >= 7 THEN 'The host was given the run ' || l.offers + 1 || ' times and did not take it up.'
			ELSE 'The host did not start the run within ' || p_start_ms / 1000 || ' s.' END);
		IF l.why IS NULL THEN
			PERFORM eph_node_failed(l.node_id, v_now);
		END IF;
		RETURN QUERY SELECT l.run_id, v_outcome, l.node_id, c.memory_mib, c.vcpus, c.isolation = 'emulated' FROM queue_class c WHERE c.id = l.class_id;
	END LOOP;
END $$;

-- The text says whether the host said that the VM is gone.
CREATE OR REPLACE FUNCTION eph_sweep_lost(p_lease_ms bigint, p_grace_ms bigint, p_limit integer)
RETURNS TABLE (run_id text, outcome text, node_id text, memory_mib integer, vcpus integer, emulated boolean) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
	v_now bigint := eph_now_ms();
	v_counts boolean := eph_time_counts(v_now);
	l record;
BEGIN
	FOR l IN
		SELECT r.run_id, r.node_id, r.state, lost.why FROM run_live r LEFT JOIN eph_lost_nodes(v_now, p_grace_ms) lost ON lost.node_id = r.node_id
		WHERE r.node_id IS NOT NULL AND r.state IN ('running', 'ending') AND (lost.node_id IS NOT NULL
			OR (v_counts AND r.seen_at_ms + p_lease_ms + p_grace_ms < v_now))
		ORDER BY r.run_id LIMIT p_limit FOR UPDATE OF r SKIP LOCKED
	LOOP
		PERFORM eph_end(l.run_id, v_now, 'interrupted', 'node_lost', CASE
			WHEN l.state = 'ending' THEN 'The host destroyed the microVM and did not report how the run ended.'
			WHEN l.why = 'revoked' THEN 'The host was revoked during the run.'
			WHEN l.why = 'lost' THEN 'The host stopped answering during the run.'
			ELSE 'The host does not know this run any more.' END, NULL, NULL);
		PERFORM eph_void(l.run_id);
		RETURN QUERY SELECT l.run_id, 'ended', l.node_id, NULL::integer, NULL::integer, NULL::boolean;
	END LOOP;
END $$;

CREATE OR REPLACE FUNCTION eph_sweep_ending(p_ending_ms bigint, p_cancel_ms bigint, p_slack_ms bigint, p_limit integer)
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
			PERFORM eph_end(l.run_id, v_now, 'cancelled', 'cancelled', CASE WHEN l.state = 'ending' THEN ''
				ELSE 'The run was cancelled; its host did not confirm that the microVM is destroyed.' END, NULL, NULL);
		ELSIF l.state = 'ending' THEN
			PERFORM eph_end(l.run_id, v_now, 'interrupted', 'node_lost', 'The host destroyed the microVM and did not report how the run ended.', NULL, NULL);
		ELSE
			PERFORM eph_end(l.run_id, v_now, 'timed_out', 'timed_out', 'The host did not end the run at its timeout.', NULL, NULL);
		END IF;
		PERFORM eph_void(l.run_id);
		RETURN QUERY SELECT l.run_id, 'ended', l.node_id, NULL::integer, NULL::integer, NULL::boolean;
	END LOOP;
END $$;

CREATE OR REPLACE FUNCTION eph_sweep_clock(p_instance text, p_version text, p_schema integer, p_lease_ms bigint) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
	v_now bigint := eph_now_ms();
	v_gap bigint;
BEGIN
	SELECT v_now - at_ms INTO v_gap FROM sweep_clock FOR UPDATE;
	IF v_gap < -5000 THEN
		-- The clock went back: what it said before is ahead of us now, and would stand still until it is reached again. Leases begin anew.
		UPDATE sweep_clock SET at_ms = v_now, lease_floor_ms = v_now + p_lease_ms;
		PERFORM 1 FROM run_live WHERE greatest(seen_at_ms, state_at_ms, offer_after_ms) > v_now ORDER BY run_id FOR NO KEY UPDATE;
		UPDATE run_live SET seen_at_ms = least(seen_at_ms, v_now), state_at_ms = least(state_at_ms, v_now), offer_after_ms = least(offer_after_ms, v_now)
		WHERE greatest(seen_at_ms, state_at_ms, offer_after_ms) > v_now;
		PERFORM 1 FROM nodes_live ORDER BY node_id FOR NO KEY UPDATE;
		UPDATE nodes_live SET lease_until_ms = least(lease_until_ms, v_now + p_lease_ms), hold_until_ms = least(hold_until_ms, v_now),
			probation_until_ms = least(probation_until_ms, v_now + 300000);
		UPDATE queue_class SET reserved_until_ms = least(reserved_until_ms, v_now);
	END IF;
	UPDATE sweep_clock SET at_ms = greatest(at_ms, v_now), lease_floor_ms = CASE WHEN v_gap > 5000 THEN v_now + p_lease_ms ELSE lease_floor_ms END;
	INSERT INTO binaries (instance, version, schema_version, seen_at_ms) VALUES (p_instance, p_version, p_schema, v_now)
	ON CONFLICT (instance) DO UPDATE SET seen_at_ms = EXCLUDED.seen_at_ms WHERE binaries.seen_at_ms < v_now - 10000;
	RETURN v_gap;
END $$;

CREATE OR REPLACE FUNCTION eph_sweep_expire(p_limit integer) RETURNS bigint LANGUAGE plpgsql AS $$
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
	DELETE FROM late_reports WHERE run_id IN (SELECT run_id FROM late_reports WHERE first_at_ms < v_now - 365 * 86400000::bigint ORDER BY first_at_ms LIMIT p_limit);
	GET DIAGNOSTICS v_n = ROW_COUNT; v_sum := v_sum + v_n;
	-- A file that no create of the last 25 hours named: a run waits for its host for a day at most. (run_create.c dates what only refused
	-- creates named.)
	FOR f IN SELECT org_id, sha256 FROM chunk_files WHERE used_at_ms < v_now - 90000000 AND org_id <> '' ORDER BY used_at_ms LIMIT 20 FOR UPDATE SKIP LOCKED LOOP
		DELETE FROM chunks WHERE org_id = f.org_id AND sha256 = f.sha256;
		DELETE FROM chunk_files WHERE org_id = f.org_id AND sha256 = f.sha256;
		v_sum := v_sum + 1;
	END LOOP;
	RETURN v_sum;
END $$;

-- ---- money that comes in ---------------------------------------------------------------------------------------------------------

CREATE OR REPLACE FUNCTION eph_credit(p_org text, p_amount bigint, p_note text, p_key text, p_hash bytea, p_key_ms bigint)
RETURNS TABLE (result text, balance bigint, reserved bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
	v_now bigint := eph_now_ms();
	v_seen bytea;
	h org_hot;
BEGIN
	SELECT * INTO h FROM org_hot WHERE org_id = p_org FOR UPDATE;
	IF h.org_id IS NULL THEN
		RETURN QUERY SELECT 'not_found', 0::bigint, 0::bigint;
		RETURN;
	END IF;
	IF p_key IS NOT NULL THEN
		SELECT i.body_hash INTO v_seen FROM idempotency i WHERE i.org_id = p_org AND i.endpoint = 'credit' AND i.key = p_key AND i.expires_at_ms > v_now;
		IF v_seen IS NOT NULL THEN
			RETURN QUERY SELECT CASE WHEN v_seen = p_hash THEN 'replayed' ELSE 'mismatch' END, h.balance, h.reserved;
			RETURN;
		END IF;
	END IF;
	IF p_amount NOT BETWEEN -1000000000000000 AND 1000000000000000 OR h.balance > 1000000000000000 - p_amount
			OR (p_amount < 0 AND (h.balance < -1000000000000000 - p_amount OR (NOT h.unlimited AND h.balance + p_amount < h.reserved))) THEN
		RETURN QUERY SELECT 'limit', h.balance, h.reserved;
		RETURN;
	END IF;
	IF p_amount <> 0 THEN
		INSERT INTO ledger (at_ms, org_id, kind, balance_delta, reserved_delta, note)
		VALUES (v_now, p_org, CASE WHEN p_amount > 0 THEN 'deposit' ELSE 'adjust' END, p_amount, 0, p_note);
		UPDATE org_hot SET balance = org_hot.balance + p_amount WHERE org_id = p_org;
	END IF;
	IF p_key IS NOT NULL THEN
		INSERT INTO idempotency AS i (org_id, endpoint, key, body_hash, run_id, expires_at_ms) VALUES (p_org, 'credit', p_key, p_hash, '', v_now + p_key_ms)
		ON CONFLICT (org_id, endpoint, key) DO UPDATE SET body_hash = EXCLUDED.body_hash, expires_at_ms = EXCLUDED.expires_at_ms;
	END IF;
	RETURN QUERY SELECT 'done', h.balance + p_amount, h.reserved;
END $$;
