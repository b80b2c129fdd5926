/*
 * What a test wants to go wrong, and the copy of what was asked that a test may read: two files beside the program, and nothing of
 * what is tested. Both may be missing.
 *
 *   faults     lines `name = value`; the names are in README.md
 *   log.sock   a datagram socket of the test: gets each request as `METHOD path\n` and its body
 */
#ifndef STANDIN_FAULTS_H
#define STANDIN_FAULTS_H

#include <stdbool.h>
#include <stddef.h>

/* Reads both; blocks for a read of a small file. */
void faults_load(void);
/* The value of a fault, or NULL. Valid for ever. */
const char *fault(const char *name);
/* Is this one of the fault's words? `hang = create boot`: fault_is("hang", "boot"). */
bool fault_is(const char *name, const char *word);
/* A number, 0 when there is none. */
int fault_number(const char *name);

/* The path of a file beside this program; false: it does not fit. */
bool beside_program(const char *name, char *out, size_t size);

void faults_log(const char *method, const char *path, const void *body, size_t n);

#endif
