/*
 * The command line, as Cloud Hypervisor v53.0 takes it when it is driven over its API. Called once by main.
 */
#ifndef STANDIN_ARGS_H
#define STANDIN_ARGS_H

struct args {
	const char *api_path;   /* where to listen; NULL: api_fd */
	const char *event_path; /* file for events; NULL: event_fd */
	const char *log_file;   /* NULL: stderr */
	int api_fd, event_fd;   /* -1: none */
	int verbose;            /* 0 to 3: warn, info, debug, trace */
};

/* -1: go on. Else the status to exit with: the answer or the complaint is printed. `version` is what --version says. */
int args_parse(int argc, char **argv, const char *version, struct args *out);

#endif
