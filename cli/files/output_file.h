/*
 * A file that appears complete or not at all: written under the temporary name .FILE.tmp-PID beside it, synced, then given
 * its name. Nothing is left behind when it is dropped.
 */
#ifndef CLI_OUTPUT_FILE_H
#define CLI_OUTPUT_FILE_H

#include "cli/output/errors.h"

typedef struct cli_output cli_output;

/* Is the output standard output? It takes the bytes as they come, and appears incomplete if something fails meanwhile. */
bool cli_output_is_standard(const char *path);
/*
 * EXISTS if there is something at `path` already, unless `force` and it is a regular file. Asked first of all, so that
 * nobody waits for a load that cannot be stored.
 */
ckd_status cli_output_check(const char *path, bool force, ckd_error *err);
/* Creates all folders above the path that are missing. */
ckd_status cli_output_make_folders(const char *path, ckd_error *err);
/* Creates the temporary file, with room for `size` bytes where the file system can tell. */
ckd_status cli_output_open(cli_output **out, const char *path, bool force, uint64_t size, ckd_error *err);
ckd_status cli_output_write(cli_output *output, const void *data, size_t size, ckd_error *err);
/* Syncs it, gives it its name (without replacing anything unless `force`), syncs the directory. Frees it in any case. */
ckd_status cli_output_commit(cli_output *output, ckd_error *err);
/* All of it in one. */
ckd_status cli_output_bytes(const char *path, bool force, const void *data, size_t size, ckd_error *err);
/* Makes the names in a folder durable. */
ckd_status cli_output_sync_folder(const char *path, ckd_error *err);
/* Removes the temporary file; accepts NULL. */
void cli_output_drop(cli_output *output);

#endif
