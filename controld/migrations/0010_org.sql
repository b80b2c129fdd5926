-- Organizations, keys, money that comes in, nodes that enrol. Each returns a code, and an id where one is made.

CREATE FUNCTION eph_org_create(p_id text, p_name text, p_emulated boolean, p_unlimited boolean, p_model text, p_cost bigint, p_max_queued bigint,
	p_max_running bigint) RETURNS TABLE (result text, detail text) LANGUAGE plpgsql AS $$
BEGIN
	IF p_model <> '' AND NOT EXISTS (SELECT 1 FROM models WHERE id = p_model) THEN
		RETURN QUERY SELECT 'not_found', 'no model has the id ' || p_model;
		RETURN;
	END IF;
	INSERT INTO organizations (id, name, allow_emulated, default_model, default_cost_micros, created_at_ms)
	VALUES (p_id, p_name, p_emulated, p_model, p_cost, eph_now_ms()) ON CONFLICT (name) DO NOTHING;
	IF NOT FOUND THEN
		RETURN QUERY SELECT 'conflict', 'an organization named ' || p_name || ' exists';
		RETURN;
	END IF;
	INSERT INTO org_hot (org_id, unlimited, max_queued, max_running) VALUES (p_id, p_unlimited, nullif(p_max_queued, 0), nullif(p_max_running, 0));
	RETURN QUERY SELECT 'done', '';
END $$;

-- NULL: unchanged. A limit of 0: the deployment's.
CREATE FUNCTION eph_org_update(p_id text, p_name text, p_disabled boolean, p_emulated boolean, p_unlimited boolean, p_model text, p_cost bigint,
	p_max_queued bigint, p_max_running bigint) RETURNS TABLE (result text, detail text) LANGUAGE plpgsql AS $$
BEGIN
	IF p_model <> '' AND NOT EXISTS (SELECT 1 FROM models WHERE id = p_model) THEN
		RETURN QUERY SELECT 'not_found', 'no model has the id ' || p_model;
		RETURN;
	END IF;
	IF EXISTS (SELECT 1 FROM organizations WHERE name = p_name AND id <> p_id) THEN
		RETURN QUERY SELECT 'conflict', 'an organization named ' || p_name || ' exists';
		RETURN;
	END IF;
	PERFORM 1 FROM org_hot WHERE org_id = p_id FOR UPDATE;
	IF NOT FOUND THEN
		RETURN QUERY SELECT 'not_found', 'no organization has the id ' || p_id;
		RETURN;
	END IF;
	IF NOT coalesce(p_unlimited, true) AND EXISTS (SELECT 1 FROM org_hot WHERE org_id = p_id AND reserved > balance) THEN
		RETURN QUERY SELECT 'conflict', 'its open reservations are above its balance; add credit first';
		RETURN;
	END IF;
	UPDATE organizations SET name = coalesce(p_name, name), disabled = coalesce(p_disabled, disabled), allow_emulated = coalesce(p_emulated, allow_emulated),
		default_model = coalesce(p_model, default_model), default_cost_micros = coalesce(p_cost, default_cost_micros) WHERE id = p_id;
	UPDATE org_hot SET unlimited = coalesce(p_unlimited, unlimited),
		max_queued = CASE WHEN p_max_queued IS NULL THEN max_queued ELSE nullif(p_max_queued, 0) END,
		max_running = CASE WHEN p_max_running IS NULL THEN max_running ELSE nullif(p_max_running, 0) END WHERE org_id = p_id;
	RETURN QUERY SELECT 'done', '';
END $$;

CREATE FUNCTION eph_credit(p_org text, p_amount bigint, p_note text, p_key text, p_hash bytea, p_key_ms bigint)
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
	IF h.balance + p_amount > 1000000000000000 OR (p_amount < 0 AND NOT h.unlimited AND h.balance + p_amount < h.reserved) THEN
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

CREATE FUNCTION eph_key_create(p_id text, p_org text, p_hash bytea, p_name text, p_member text, p_role text, p_expires bigint)
RETURNS TABLE (result text, detail text) LANGUAGE plpgsql AS $$
BEGIN
	PERFORM 1 FROM organizations WHERE id = p_org FOR UPDATE;
	IF NOT FOUND THEN
		RETURN QUERY SELECT 'not_found', 'no organization has the id ' || p_org;
		RETURN;
	END IF;
	IF p_member <> '' AND NOT EXISTS (SELECT 1 FROM members WHERE id = p_member AND org_id = p_org AND removed_at_ms IS NULL) THEN
		RETURN QUERY SELECT 'not_found', 'no member has the id ' || p_member;
		RETURN;
	END IF;
	IF (SELECT count(*) FROM api_keys WHERE org_id = p_org AND revoked_at_ms IS NULL) >= 1000 THEN
		RETURN QUERY SELECT 'limit', 'an organization has at most 1000 live keys; revoke some';
		RETURN;
	END IF;
	INSERT INTO api_keys (id, org_id, member_id, name, role, key_hash, created_at_ms, expires_at_ms)
	VALUES (p_id, p_org, nullif(p_member, ''), coalesce(p_name, ''), p_role, p_hash, eph_now_ms(), nullif(p_expires, 0));
	RETURN QUERY SELECT 'done', '';
END $$;

CREATE FUNCTION eph_key_revoke(p_org text, p_id text, p_keep_admin boolean) RETURNS TABLE (result text, detail text) LANGUAGE plpgsql AS $$
DECLARE
	v_now bigint := eph_now_ms();
	v_role text;
	v_revoked bigint;
BEGIN
	PERFORM 1 FROM organizations WHERE id = p_org FOR UPDATE;
	SELECT role, revoked_at_ms INTO v_role, v_revoked FROM api_keys WHERE id = p_id AND org_id = p_org;
	IF v_role IS NULL THEN
		RETURN QUERY SELECT 'not_found', 'no key has the id ' || p_id;
		RETURN;
	END IF;
	IF v_revoked IS NULL AND p_keep_admin AND v_role = 'admin' AND NOT EXISTS (SELECT 1 FROM api_keys WHERE org_id = p_org AND id <> p_id
			AND role = 'admin' AND revoked_at_ms IS NULL AND (expires_at_ms IS NULL OR expires_at_ms > v_now)) THEN
		RETURN QUERY SELECT 'conflict', 'this is the last admin key; make another one first';
		RETURN;
	END IF;
	UPDATE api_keys SET revoked_at_ms = v_now WHERE id = p_id AND revoked_at_ms IS NULL;
	RETURN QUERY SELECT 'done', '';
END $$;

-- Members' and operators' keys alike. last_used is kept to the minute, and never waited for.
CREATE FUNCTION eph_auth(p_hash bytea) RETURNS TABLE (result text, is_operator boolean, org_id text, org_name text, key_id text, key_name text,
	member_id text, role text, default_model text, default_cost bigint, allow_emulated boolean) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
	v_now bigint := eph_now_ms();
	k record;
BEGIN
	SELECT a.id, a.name, a.member_id, a.role, a.expires_at_ms, a.revoked_at_ms, a.last_used_at_ms, o.id AS org_id, o.name AS org_name, o.disabled,
		o.allow_emulated, o.default_model, o.default_cost_micros INTO k
	FROM api_keys a JOIN organizations o ON o.id = a.org_id WHERE a.key_hash = p_hash;
	IF k.id IS NULL THEN
		RETURN QUERY SELECT CASE WHEN o.revoked_at_ms IS NULL THEN 'ok' ELSE 'expired' END, true, '', '', o.id, o.name, '', 'admin', '', 0::bigint, false
		FROM operator_keys o WHERE o.key_hash = p_hash;
		RETURN;
	END IF;
	IF k.last_used_at_ms < v_now - 60000 THEN
		UPDATE api_keys SET last_used_at_ms = v_now WHERE id = (SELECT a.id FROM api_keys a WHERE a.id = k.id FOR NO KEY UPDATE SKIP LOCKED);
	END IF;
	RETURN QUERY SELECT CASE WHEN k.revoked_at_ms IS NOT NULL OR k.expires_at_ms <= v_now THEN 'expired' WHEN k.disabled THEN 'disabled' ELSE 'ok' END,
		false, k.org_id, k.org_name, k.id, k.name, coalesce(k.member_id, ''), k.role,
		coalesce(nullif(k.default_model, ''), (SELECT s.value FROM settings s WHERE s.name = 'default_model'), ''), k.default_cost_micros, k.allow_emulated;
END $$;

CREATE FUNCTION eph_enrol(p_id text, p_secret bytea, p_name text, p_labels text, p_isolation text, p_sign bytea, p_seal bytea, p_receipt bytea,
	p_seal_sig bytea, p_receipt_sig bytea) RETURNS TABLE (result text, node_id text) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
	v_now bigint := eph_now_ms();
	t node_tokens;
	n nodes;
BEGIN
	SELECT * INTO t FROM node_tokens WHERE secret_hash = p_secret FOR UPDATE;
	IF t.id IS NULL THEN
		RETURN QUERY SELECT 'unknown_token', NULL::text;
		RETURN;
	END IF;
	SELECT * INTO n FROM nodes WHERE sign_key = p_sign;
	IF n.id IS NOT NULL THEN
		RETURN QUERY SELECT CASE WHEN n.state = 'revoked' THEN 'key_revoked' ELSE 'ok' END, n.id;
		RETURN;
	END IF;
	IF t.expires_at_ms <= v_now THEN
		RETURN QUERY SELECT 'expired', NULL::text;
	ELSIF t.uses_left <= 0 THEN
		RETURN QUERY SELECT 'used_up', NULL::text;
	ELSIF t.isolation <> 'kvm' AND p_isolation = 'kvm' THEN
		RETURN QUERY SELECT 'isolation', NULL::text;
	ELSE
		UPDATE node_tokens SET uses_left = uses_left - 1 WHERE id = t.id;
		INSERT INTO nodes (id, name, labels, isolation, sign_key, seal_key, receipt_key, seal_sig, receipt_sig, created_at_ms)
		VALUES (p_id, p_name, coalesce(nullif(t.labels, ''), p_labels), p_isolation, p_sign, p_seal, p_receipt, p_seal_sig, p_receipt_sig, v_now);
		INSERT INTO nodes_live (node_id, isolation) VALUES (p_id, p_isolation);
		RETURN QUERY SELECT 'ok', p_id;
	END IF;
END $$;

CREATE FUNCTION eph_node_act(p_node text, p_action text) RETURNS TABLE (result text, detail text) LANGUAGE plpgsql AS $$
DECLARE
	v_state text;
	v_new text := CASE p_action WHEN 'drain' THEN 'draining' WHEN 'undrain' THEN 'active' ELSE 'revoked' END;
BEGIN
	SELECT state INTO v_state FROM nodes WHERE id = p_node FOR UPDATE;
	IF v_state IS NULL THEN
		RETURN QUERY SELECT 'not_found', 'no node has the id ' || p_node;
	ELSIF v_state = 'revoked' AND v_new <> 'revoked' THEN
		RETURN QUERY SELECT 'conflict', 'the node is revoked; enrol it again with a new key';
	ELSE
		IF v_state <> v_new THEN
			UPDATE nodes SET state = v_new WHERE id = p_node;
			IF v_new <> 'revoked' THEN
				PERFORM eph_command(p_node, p_action, NULL, NULL, eph_now_ms());
			END IF;
		END IF;
		RETURN QUERY SELECT 'done', '';
	END IF;
END $$;
