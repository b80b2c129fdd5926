-- Providers, models, prices.

CREATE TABLE providers (
	name text PRIMARY KEY CHECK (name ~ '^[A-Za-z0-9._-]{1,64}$'),
	base_url text NOT NULL,
	any_address boolean NOT NULL DEFAULT false,
	kind text NOT NULL DEFAULT 'openai',
	sealed_key bytea NOT NULL DEFAULT ''
);

CREATE TABLE models (
	id text PRIMARY KEY,                     -- provider/model
	provider text NOT NULL REFERENCES providers,
	upstream text NOT NULL,
	limit_param text NOT NULL DEFAULT 'max_completion_tokens',
	max_output_tokens bigint NOT NULL CHECK (max_output_tokens > 0),
	min_output_tokens bigint NOT NULL CHECK (min_output_tokens > 0),
	tokens_per_byte_milli bigint NOT NULL CHECK (tokens_per_byte_milli > 0),
	overhead_tokens bigint NOT NULL CHECK (overhead_tokens >= 0),
	call_timeout_ms bigint NOT NULL CHECK (call_timeout_ms > 0)
);

-- The row in force is the last whose time has come; a run keeps a copy of what priced it.
CREATE TABLE model_prices (
	model_id text NOT NULL REFERENCES models,
	valid_from_ms bigint NOT NULL,
	input bigint NOT NULL CHECK (input >= 0),
	cached_input bigint NOT NULL CHECK (cached_input >= 0),
	output bigint NOT NULL CHECK (output >= 0),
	model_percent bigint NOT NULL CHECK (model_percent >= 0),
	PRIMARY KEY (model_id, valid_from_ms)
);
CREATE TABLE common_prices (
	valid_from_ms bigint PRIMARY KEY,
	run_fee bigint NOT NULL CHECK (run_fee >= 0),
	compute bigint NOT NULL CHECK (compute >= 0),
	web_request bigint NOT NULL CHECK (web_request >= 0),
	web_search bigint NOT NULL CHECK (web_search >= 0)
);
-- 200 micros a second of compute.
INSERT INTO common_prices VALUES (0, 0, 200000, 0, 0);

CREATE FUNCTION eph_price_model_put(p_model text, p_input bigint, p_cached bigint, p_output bigint, p_percent bigint)
RETURNS text LANGUAGE plpgsql AS $$
BEGIN
	IF NOT EXISTS (SELECT 1 FROM models WHERE id = p_model) THEN
		RETURN 'not_found';
	END IF;
	INSERT INTO model_prices VALUES (p_model, eph_now_ms(), p_input, CASE WHEN p_cached < 0 THEN p_input ELSE p_cached END, p_output, p_percent)
	ON CONFLICT (model_id, valid_from_ms) DO UPDATE SET input = EXCLUDED.input, cached_input = EXCLUDED.cached_input,
		output = EXCLUDED.output, model_percent = EXCLUDED.model_percent;
	RETURN 'done';
END $$;

CREATE FUNCTION eph_price_common_put(p_fee bigint, p_compute bigint, p_request bigint, p_search bigint) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
	c common_prices;
BEGIN
	SELECT * INTO c FROM common_prices WHERE valid_from_ms <= eph_now_ms() ORDER BY valid_from_ms DESC LIMIT 1;
	INSERT INTO common_prices VALUES (eph_now_ms(), CASE WHEN p_fee < 0 THEN c.run_fee ELSE p_fee END,
		CASE WHEN p_compute < 0 THEN c.compute ELSE p_compute END, CASE WHEN p_request < 0 THEN c.web_request ELSE p_request END,
		CASE WHEN p_search < 0 THEN c.web_search ELSE p_search END)
	ON CONFLICT (valid_from_ms) DO UPDATE SET run_fee = EXCLUDED.run_fee, compute = EXCLUDED.compute,
		web_request = EXCLUDED.web_request, web_search = EXCLUDED.web_search;
	RETURN 'done';
END $$;
