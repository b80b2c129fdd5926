/*
 * Why a run ended otherwise than `succeeded`: one table of codes with the status each one gives, a title and a remedy for people.
 * Brokers, keepers and controld name codes; texts come from here. On the wire and in Postgres a code is its text.
 */
#ifndef PROTO_ERRCODE_H
#define PROTO_ERRCODE_H

#include <stdbool.h>

enum run_outcome { OUTCOME_SUCCEEDED = 1, OUTCOME_FAILED, OUTCOME_CANCELLED, OUTCOME_TIMED_OUT, OUTCOME_INTERRUPTED };

#define ERRCODE_TABLE(X)                                                                                                           \
	X(NONE, "", OUTCOME_SUCCEEDED, "", "")                                                                                     \
	X(NO_CAPACITY, "no_capacity", OUTCOME_FAILED, "No host had room for this run in time.",                                    \
			"Try again later, ask for a smaller size, or add a node.")                                                 \
	X(VM_START_FAILED, "vm_start_failed", OUTCOME_FAILED, "The microVM could not be started.",                                 \
			"The message says what failed on the host; its operator can mend it, then start the run again.")           \
	X(VM_CRASHED, "vm_crashed", OUTCOME_FAILED, "The microVM ended before the run did.",                                       \
			"Start the run again; if it happens again give it a larger size.")                                         \
	X(WORKER_PROTOCOL_ERROR, "worker_protocol_error", OUTCOME_FAILED, "The worker broke the protocol with its host.",          \
			"Code in the run may have damaged the worker; look at its last commands.")                                 \
	X(WORKER_FAILED, "worker_failed", OUTCOME_FAILED, "The worker could not go on.",                                           \
			"The message says why; start the run again.")                                                              \
	X(MODEL_ERROR, "model_error", OUTCOME_FAILED, "The model provider did not give a usable answer.",                          \
			"The message has the provider's answer; try again, or another model.")                                     \
	X(MODEL_CALLS_EXCEEDED, "model_calls_exceeded", OUTCOME_FAILED, "The run used all its model calls without an answer.",     \
			"Raise max_model_calls or make the task smaller.")                                                         \
	X(BUDGET_EXCEEDED, "budget_exceeded", OUTCOME_FAILED, "The run reached its cost cap.",                                     \
			"Raise max_cost_micros or make the task smaller.")                                                         \
	X(OUTPUT_TOO_LARGE, "output_too_large", OUTCOME_FAILED, "The output is over 1 MiB.", "Ask for a shorter answer.")          \
	X(OUTPUT_INVALID, "output_invalid", OUTCOME_FAILED, "The output does not match its schema.",                               \
			"Look at the output and the schema; say in the prompt what is wanted.")                                    \
	X(EVENTS_OVERFLOW, "events_overflow", OUTCOME_FAILED, "The run's record is full.", "Make the run print less.")             \
	X(CANCELLED, "cancelled", OUTCOME_CANCELLED, "The run was cancelled.", "Start it again when it is wanted.")                \
	X(TIMED_OUT, "timed_out", OUTCOME_TIMED_OUT, "The run reached its timeout.",                                               \
			"Raise timeout_seconds or make the task smaller.")                                                         \
	X(NODE_RESTARTED, "node_restarted", OUTCOME_INTERRUPTED, "The host's service restarted during the run.",                   \
			"Start the run again.")                                                                                    \
	X(NODE_LOST, "node_lost", OUTCOME_INTERRUPTED, "The host stopped answering during the run.", "Start the run again.")       \
	X(LEASE_EXPIRED, "lease_expired", OUTCOME_INTERRUPTED, "The host lost contact with the control plane.",                    \
			"Start the run again.")                                                                                    \
	X(BROKER_LOST, "broker_lost", OUTCOME_INTERRUPTED, "The run's broker ended unexpectedly.", "Start the run again.")         \
	X(CHANNEL_LOST, "channel_lost", OUTCOME_INTERRUPTED, "The run's channel process ended unexpectedly.",                      \
			"Start the run again.")                                                                                    \
	X(FENCED, "fenced", OUTCOME_INTERRUPTED, "The run was taken away from its host.", "Start the run again.")                  \
	X(ZDR_KEY_LOST, "zdr_key_lost", OUTCOME_FAILED, "The run's content key was lost before it started.",                       \
			"Start the run again.")                                                                                    \
	X(INTERNAL, "internal", OUTCOME_FAILED, "A fault of the service ended the run.",                                           \
			"Start the run again; tell the operator its id.")

enum errcode {
#define X(name, text, outcome, title, remedy) ERRCODE_##name,
	ERRCODE_TABLE(X)
#undef X
			ERRCODE_COUNT
};

const char *errcode_text(enum errcode c);
const char *errcode_title(enum errcode c);
const char *errcode_remedy(enum errcode c);
enum run_outcome errcode_outcome(enum errcode c);
/* ERRCODE_COUNT when unknown. */
enum errcode errcode_parse(const char *text);
/* "succeeded", "failed", "cancelled", "timed_out", "interrupted". */
const char *outcome_text(enum run_outcome o);
bool outcome_valid(int o);

#endif
