/* The operator's own list of what a VMM finds in its tree (vmm.h). Pure. */
#include "vmm/vmm.h"

#include "common/text.h"

#include <string.h>

bool vmm_bind_files(const struct vmm_host *host, struct jail_job *job)
{
	for (const char *s = host->files ? host->files : ""; *s != '\0';) {
		size_t n = strcspn(s, ", ");
		char path[JAIL_PATH_MAX];

		if (n > 0 && (!text_fmt(path, sizeof(path), "%.*s", (int)n, s) || !jail_job_bind(job, path, path, 0)))
			return false;
		s += n + (s[n] != '\0');
	}
	return true;
}
