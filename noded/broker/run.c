/* The run's state table and the decision what to do next (run.h). Pure but for the setter's log line. */
#include "run.h"

#include "common/log.h"

static const char *const state_names[RUN_STATES] = {
	[RUN_NEW] = "new",
	[RUN_BOOT] = "boot",
	[RUN_PROBE] = "probe",
	[RUN_READY] = "ready",
	[RUN_START] = "start",
	[RUN_SETUP] = "setup",
	[RUN_WORK] = "work",
	[RUN_DESTROY] = "destroy",
	[RUN_SIGN] = "sign",
	[RUN_FINISH] = "finish",
	[RUN_OVER] = "over",
};

static const char *const step_names[] = {
	[STEP_WAIT] = "wait",
	[STEP_BOOT] = "boot",
	[STEP_PROBE] = "probe",
	[STEP_READY] = "ready",
	[STEP_START] = "start",
	[STEP_SETUP] = "setup",
	[STEP_WORK] = "work",
	[STEP_DESTROY] = "destroy",
	[STEP_SIGN] = "sign",
	[STEP_FINISH] = "finish",
	[STEP_REFUSE] = "refuse",
	[STEP_LEAVE] = "leave",
};

#define TO(s) (1u << (s))
static const unsigned legal[RUN_STATES] = {
	[RUN_NEW] = TO(RUN_BOOT) | TO(RUN_OVER),
	[RUN_BOOT] = TO(RUN_PROBE) | TO(RUN_DESTROY),
	[RUN_PROBE] = TO(RUN_READY) | TO(RUN_START) | TO(RUN_DESTROY),
	[RUN_READY] = TO(RUN_START) | TO(RUN_DESTROY),
	[RUN_START] = TO(RUN_SETUP) | TO(RUN_DESTROY),
	[RUN_SETUP] = TO(RUN_WORK) | TO(RUN_DESTROY),
	[RUN_WORK] = TO(RUN_DESTROY),
	[RUN_DESTROY] = TO(RUN_SIGN) | TO(RUN_OVER),
	[RUN_SIGN] = TO(RUN_FINISH) | TO(RUN_OVER),
	[RUN_FINISH] = TO(RUN_OVER),
	[RUN_OVER] = 0,
};

static const struct {
	enum run_step step;
	enum run_state to;
} moves[] = {
	{ STEP_BOOT, RUN_BOOT },
	{ STEP_PROBE, RUN_PROBE },
	{ STEP_READY, RUN_READY },
	{ STEP_START, RUN_START },
	{ STEP_SETUP, RUN_SETUP },
	{ STEP_WORK, RUN_WORK },
	{ STEP_DESTROY, RUN_DESTROY },
	{ STEP_SIGN, RUN_SIGN },
	{ STEP_FINISH, RUN_FINISH },
	{ STEP_REFUSE, RUN_OVER },
	{ STEP_LEAVE, RUN_OVER },
};

bool run_granted(uint8_t fence)
{
	return fence == FENCE_APPLIED || fence == FENCE_DUPLICATE;
}

static enum run_step after_destroy(const struct run_seen *seen)
{
	if (!seen->gone)
		return STEP_WAIT;
	if (seen->fenced || !seen->assigned)
		return STEP_LEAVE;
	if (!seen->start_asked)
		return STEP_REFUSE;
	if (seen->fence == 0)
		return STEP_WAIT;
	return run_granted(seen->fence) ? STEP_SIGN : STEP_LEAVE;
}

enum run_step run_next(enum run_state state, const struct run_seen *seen)
{
	bool refused = seen->fence != 0 && !run_granted(seen->fence);
	bool end = seen->ending || seen->fenced || refused;

	switch (state) {
	case RUN_NEW: return seen->assigned || seen->prepared ? STEP_BOOT : STEP_WAIT;
	case RUN_BOOT: return end ? STEP_DESTROY : seen->vmm_up ? STEP_PROBE : STEP_WAIT;
	case RUN_PROBE: return end ? STEP_DESTROY : !seen->hello ? STEP_WAIT : seen->assigned ? STEP_START : STEP_READY;
	case RUN_READY: return end ? STEP_DESTROY : seen->assigned ? STEP_START : STEP_WAIT;
	case RUN_START: return end ? STEP_DESTROY : run_granted(seen->fence) ? STEP_SETUP : STEP_WAIT;
	case RUN_SETUP: return end ? STEP_DESTROY : seen->setup_acked ? STEP_WORK : STEP_WAIT;
	case RUN_WORK: return end ? STEP_DESTROY : STEP_WAIT;
	case RUN_DESTROY: return after_destroy(seen);
	case RUN_SIGN: return seen->fenced ? STEP_LEAVE : seen->is_signed ? STEP_FINISH : STEP_WAIT;
	case RUN_FINISH: return seen->finished || seen->fenced ? STEP_LEAVE : STEP_WAIT;
	case RUN_OVER:
	case RUN_STATES: break;
	}
	return STEP_WAIT;
}

enum run_state run_step_state(enum run_state from, enum run_step step)
{
	for (size_t i = 0; i < sizeof(moves) / sizeof(moves[0]); i++)
		if (moves[i].step == step)
			return moves[i].to;
	return from;
}

bool run_move_legal(enum run_state from, enum run_state to)
{
	return from < RUN_STATES && to < RUN_STATES && (legal[from] & TO(to)) != 0;
}

const char *run_state_name(enum run_state s)
{
	return s < RUN_STATES ? state_names[s] : "unknown";
}

const char *run_step_name(enum run_step s)
{
	return s <= STEP_LEAVE ? step_names[s] : "unknown";
}

void run_set(enum run_state *state, enum run_state to, const char *run_id)
{
	check_abort(run_move_legal(*state, to));
	log_info("run state run=%s from=%s to=%s", run_id, run_state_name(*state), run_state_name(to));
	*state = to;
}

enum errcode run_code_before_start(enum errcode code)
{
	switch (code) {
	case ERRCODE_VM_CRASHED:
	case ERRCODE_CHANNEL_LOST:
	case ERRCODE_WORKER_PROTOCOL_ERROR:
	case ERRCODE_WORKER_FAILED:
	case ERRCODE_INTERNAL: return ERRCODE_VM_START_FAILED;
	default: return code;
	}
}
