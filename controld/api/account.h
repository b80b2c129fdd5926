/* What member calls (account.c, members.c) and operator calls (operator*.c) have in common: paging, keys, members. */
#ifndef CONTROLD_API_ACCOUNT_H
#define CONTROLD_API_ACCOUNT_H

#include "api_internal.h"

/* ?limit= and ?cursor=; false after a 400. */
bool list_page(struct api_req *r, const char **cursor, int *limit);
void key_list_answer(struct api_req *r, const char *org_id);
void key_create_answer(struct api_req *r, const char *org_id);
void key_revoke_answer(struct api_req *r, const char *org_id, const char *key_id, bool keep_admin);
void member_list_answer(struct api_req *r, const char *org_id);
void member_create_answer(struct api_req *r, const char *org_id);

#endif
