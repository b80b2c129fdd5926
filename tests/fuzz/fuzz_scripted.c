/* link: controld_scripted */
/* A chat completion request as the scripted provider reads it, planned and rendered. */
#include "controld/scripted/plan.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct render render;
	struct chat chat;
	struct plan plan;
	struct err e;

	if (chat_parse(data, size, &chat, &e) != 0)
		return 0;
	if (plan_make(&chat, 1, &plan, &e) == 0) {
		if (!plan.http_status && render_reply(&chat, &plan, "run-1-1", 1, &render, &e) == 0)
			render_free(&render);
		plan_free(&plan);
	}
	chat_free(&chat);
	return 0;
}
