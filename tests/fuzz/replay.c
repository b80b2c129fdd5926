/* Runs a fuzz target over files and directories of inputs once: for compilers without libFuzzer, and for a single bad input. */
#include "fuzz.h"

#include <dirent.h>
#include <sys/stat.h>

static int count;

static void run_file(const char *path)
{
	FILE *f = fopen(path, "rb");
	uint8_t *data = malloc(1 << 20);
	size_t n;

	must(f && data);
	n = fread(data, 1, 1 << 20, f);
	fclose(f);
	data = realloc(data, n ? n : 1); /* exact, so that a read past the end is seen */
	must(data);
	LLVMFuzzerTestOneInput(data, n);
	free(data);
	count++;
}

static void run_path(const char *path)
{
	struct stat st;
	struct dirent *d;
	DIR *dir;
	char name[4096];

	must(stat(path, &st) == 0);
	if (!S_ISDIR(st.st_mode)) {
		run_file(path);
		return;
	}
	dir = opendir(path);
	must(dir);
	while ((d = readdir(dir)) != NULL) {
		if (d->d_name[0] == '.')
			continue;
		must(snprintf(name, sizeof(name), "%s/%s", path, d->d_name) < (int)sizeof(name));
		run_path(name);
	}
	closedir(dir);
}

int main(int argc, char **argv)
{
	LLVMFuzzerTestOneInput((const uint8_t *)"", 0);
	for (int c = 0; c < 256; c++) {
		uint8_t byte = (uint8_t)c;

		LLVMFuzzerTestOneInput(&byte, 1);
	}
	for (int i = 1; i < argc; i++)
		run_path(argv[i]);
	printf("%d inputs, and all of at most one byte\n", count);
	return 0;
}
