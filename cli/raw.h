/* Bytes of JSON values as they stand in an answer: events are served with the exact bytes of their writer, and passed on so. Pure.
 */
#ifndef CLI_RAW_H
#define CLI_RAW_H

#include <stdbool.h>
#include <stddef.h>

/* For each element of the array that is the member `key` of the object s[0..n): its bytes, without white space around. The text
 * must have been parsed by json_parse before. False when there is no such array; a false from `fn` ends the walk. */
bool raw_member_array(const char *s, size_t n, const char *key, bool (*fn)(void *arg, const char *bytes, size_t n), void *arg);

#endif
