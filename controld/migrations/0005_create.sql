-- Creating runs, many in one call. p_rows: array of
--   {idx, run (20 random hex digits), org, key, member, ik, ih, request, rh, prompt, model, price[8], cap, timeout, calls, mem, vcpus, size, shell, zdr, emu,
--    meta {k: v}, files [{path, size, sha256}]}
-- with binary as hex. One row back for each, in any order; result: created, replayed, mismatch, again (an equal key earlier in
-- p_rows: call once more), insufficient, too_many_queued, no_node, disabled. Nothing of a refused row stays.

CREATE FUNCTION eph_run_create(p_rows jsonb, p_max_queued bigint, p_max_running bigint, p_retention_ms bigint, p_key_ms bigint)
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
	PERFORM eph_class(c.mem, c.vcpus, c.emu) FROM (SELECT DISTINCT x.mem, x.vcpus, x.emu
		FROM jsonb_to_recordset(p_rows) AS x(mem integer, vcpus integer, emu boolean) ORDER BY 1, 2, 3) c;

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
				SELECT g.disabled INTO v_disabled FROM organizations g WHERE g.id = r.org;
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
				v_cls := eph_class(r.mem, r.vcpus, r.emu);
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
