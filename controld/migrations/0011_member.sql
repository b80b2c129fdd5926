-- Members of an organization, and what their keys may do: never more than the member. A key that belongs to nobody has its own role.
-- Everything that changes keys or members of an organization holds its row in `organizations`, so they happen one after the other.

ALTER TABLE members
	ADD CONSTRAINT member_role CHECK (role IN ('viewer', 'member', 'admin')),
	ADD CONSTRAINT member_size CHECK (octet_length(name) BETWEEN 1 AND 512 AND octet_length(email) <= 254);
-- What is asked looks at who is there and at live keys, however many were removed or revoked.
DROP INDEX members_org;
CREATE INDEX members_live ON members (org_id, created_at_ms DESC, id DESC) WHERE removed_at_ms IS NULL;
CREATE INDEX api_keys_live ON api_keys (org_id, member_id) WHERE revoked_at_ms IS NULL;

CREATE FUNCTION eph_role_rank(p_role text) RETURNS integer LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
	SELECT array_position(ARRAY['viewer', 'member', 'admin'], p_role)
$$;

-- What a key may do; p_member is NULL where it belongs to no member.
CREATE FUNCTION eph_key_role(p_key text, p_member text) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
	SELECT CASE WHEN eph_role_rank(p_member) < eph_role_rank(p_key) THEN p_member ELSE p_key END
$$;

-- The live admin keys of an organization. The caller holds the organization's row.
CREATE FUNCTION eph_admin_keys(p_org text) RETURNS TABLE (key_id text, member_id text) LANGUAGE sql STABLE AS $$
	SELECT k.id, k.member_id FROM api_keys k LEFT JOIN members m ON m.id = k.member_id
	WHERE k.org_id = p_org AND k.role = 'admin' AND coalesce(m.role, 'admin') = 'admin' AND k.revoked_at_ms IS NULL
		AND (k.expires_at_ms IS NULL OR k.expires_at_ms > eph_now_ms())
$$;

-- Would the organization have no admin key any more without this member's?
CREATE FUNCTION eph_last_admin(p_org text, p_member text) RETURNS boolean LANGUAGE sql STABLE AS $$
	SELECT count(*) > 0 AND bool_and(a.member_id IS NOT DISTINCT FROM p_member) FROM eph_admin_keys(p_org) a
$$;

CREATE FUNCTION eph_member_create(p_id text, p_org text, p_name text, p_email text, p_role text) RETURNS TABLE (result text, detail text)
LANGUAGE plpgsql AS $$
BEGIN
	PERFORM 1 FROM organizations WHERE id = p_org FOR UPDATE;
	IF NOT FOUND THEN
		RETURN QUERY SELECT 'not_found', 'no organization has the id ' || p_org;
		RETURN;
	END IF;
	IF (SELECT count(*) FROM members WHERE org_id = p_org AND removed_at_ms IS NULL) >= 1000 THEN
		RETURN QUERY SELECT 'limit', 'an organization has at most 1000 members; remove some';
		RETURN;
	END IF;
	INSERT INTO members (id, org_id, name, email, role, created_at_ms) VALUES (p_id, p_org, p_name, coalesce(p_email, ''), p_role, eph_now_ms());
	RETURN QUERY SELECT 'done', '';
END $$;

-- NULL: unchanged.
CREATE FUNCTION eph_member_update(p_org text, p_id text, p_name text, p_email text, p_role text)
RETURNS TABLE (result text, detail text) LANGUAGE plpgsql AS $$
BEGIN
	PERFORM 1 FROM organizations WHERE id = p_org FOR UPDATE;
	IF NOT EXISTS (SELECT 1 FROM members WHERE id = p_id AND org_id = p_org AND removed_at_ms IS NULL) THEN
		RETURN QUERY SELECT 'not_found', 'no member has the id ' || p_id;
		RETURN;
	END IF;
	IF p_role <> 'admin' AND eph_last_admin(p_org, p_id) THEN
		RETURN QUERY SELECT 'conflict', 'this member holds the last admin key; make another admin key first';
		RETURN;
	END IF;
	UPDATE members SET name = coalesce(p_name, name), email = coalesce(p_email, email), role = coalesce(p_role, role) WHERE id = p_id;
	RETURN QUERY SELECT 'done', '';
END $$;

-- The row stays, for runs that name it; all its keys go. Done as well when it is removed already.
CREATE FUNCTION eph_member_remove(p_org text, p_id text) RETURNS TABLE (result text, detail text) LANGUAGE plpgsql AS $$
DECLARE
	v_now bigint := eph_now_ms();
BEGIN
	PERFORM 1 FROM organizations WHERE id = p_org FOR UPDATE;
	IF NOT EXISTS (SELECT 1 FROM members WHERE id = p_id AND org_id = p_org) THEN
		RETURN QUERY SELECT 'not_found', 'no member has the id ' || p_id;
		RETURN;
	END IF;
	IF eph_last_admin(p_org, p_id) THEN
		RETURN QUERY SELECT 'conflict', 'this member holds the last admin key; make another admin key first';
		RETURN;
	END IF;
	UPDATE members SET removed_at_ms = v_now WHERE id = p_id AND removed_at_ms IS NULL;
	UPDATE api_keys SET revoked_at_ms = v_now WHERE org_id = p_org AND member_id = p_id AND revoked_at_ms IS NULL;
	RETURN QUERY SELECT 'done', '';
END $$;

-- As in 0010, and a member's key has no higher role than its member; that it would is the only conflict.
CREATE OR REPLACE FUNCTION eph_key_create(p_id text, p_org text, p_hash bytea, p_name text, p_member text, p_role text, p_expires bigint)
RETURNS TABLE (result text, detail text) LANGUAGE plpgsql AS $$
DECLARE
	v_role text;
BEGIN
	PERFORM 1 FROM organizations WHERE id = p_org FOR UPDATE;
	IF NOT FOUND THEN
		RETURN QUERY SELECT 'not_found', 'no organization has the id ' || p_org;
		RETURN;
	END IF;
	IF p_member <> '' THEN
		SELECT role INTO v_role FROM members WHERE id = p_member AND org_id = p_org AND removed_at_ms IS NULL;
		IF v_role IS NULL THEN
			RETURN QUERY SELECT 'not_found', 'no member has the id ' || p_member;
			RETURN;
		END IF;
		IF eph_key_role(p_role, v_role) <> p_role THEN
			RETURN QUERY SELECT 'conflict', 'is ' || p_role || ', above the role of its member, which is ' || v_role ||
				'; take that or a lower one, or raise the member first';
			RETURN;
		END IF;
	END IF;
	IF (SELECT count(*) FROM api_keys WHERE org_id = p_org AND revoked_at_ms IS NULL) >= 1000 THEN
		RETURN QUERY SELECT 'limit', 'an organization has at most 1000 live keys; revoke some';
		RETURN;
	END IF;
	INSERT INTO api_keys (id, org_id, member_id, name, role, key_hash, created_at_ms, expires_at_ms)
	VALUES (p_id, p_org, nullif(p_member, ''), coalesce(p_name, ''), p_role, p_hash, eph_now_ms(), nullif(p_expires, 0));
	RETURN QUERY SELECT 'done', '';
END $$;

-- As in 0010, where an admin key counts as one only while its member is an admin.
CREATE OR REPLACE FUNCTION eph_key_revoke(p_org text, p_id text, p_keep_admin boolean) RETURNS TABLE (result text, detail text) LANGUAGE plpgsql AS $$
DECLARE
	v_now bigint := eph_now_ms();
BEGIN
	PERFORM 1 FROM organizations WHERE id = p_org FOR UPDATE;
	IF NOT EXISTS (SELECT 1 FROM api_keys WHERE id = p_id AND org_id = p_org) THEN
		RETURN QUERY SELECT 'not_found', 'no key has the id ' || p_id;
		RETURN;
	END IF;
	IF p_keep_admin AND (SELECT count(*) > 0 AND bool_and(a.key_id = p_id) FROM eph_admin_keys(p_org) a) THEN
		RETURN QUERY SELECT 'conflict', 'this is the last admin key; make another one first';
		RETURN;
	END IF;
	UPDATE api_keys SET revoked_at_ms = v_now WHERE id = p_id AND revoked_at_ms IS NULL;
	RETURN QUERY SELECT 'done', '';
END $$;

-- As in 0010, with the lower of the key's role and its member's.
CREATE OR REPLACE FUNCTION eph_auth(p_hash bytea) RETURNS TABLE (result text, is_operator boolean, org_id text, org_name text, key_id text,
	key_name text, member_id text, role text, default_model text, default_cost bigint, allow_emulated boolean) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
	v_now bigint := eph_now_ms();
	k record;
BEGIN
	SELECT a.id, a.name, a.member_id, eph_key_role(a.role, m.role) AS role, a.expires_at_ms, a.revoked_at_ms, a.last_used_at_ms, o.id AS org_id,
		o.name AS org_name, o.disabled, o.allow_emulated, o.default_model, o.default_cost_micros INTO k
	FROM api_keys a JOIN organizations o ON o.id = a.org_id LEFT JOIN members m ON m.id = a.member_id WHERE a.key_hash = p_hash;
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
