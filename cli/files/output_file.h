/*
 * A file that appears complete or not at all. It is written under the temporary name .FILE.tmp-PID beside it, synced,
 * then renamed. Dropping it leaves nothing behind.
 */
#ifndef CLI_OUTPUT_FILE_H
#define CLI_OUTPUT_FILE_H

#include "cli/output/errors.h"

typedef struct cli_output cli_output;

/* Is the output standard output? It receives bytes immediately, so it is incomplete after a failure. */
bool cli_output_is_standard(const char *path);
/*
 * EXISTS if `path` exists, unless `force` is set and it is a regular file. Call it first, so that no time is spent on a
 * load that cannot be stored.
 */
ckd_status cli_output_check(const char *path, bool force, ckd_error *err);
/* Creates all missing parent folders of the path. */
ckd_status cli_output_make_folders(const char *path, ckd_error *err);
/* Creates the temporary file, and reserves `size` bytes if the file system can. */
ckd_status cli_output_open(cli_output **out, const char *path, bool force, uint64_t size, ckd_error *err);
ckd_status cli_output_write(cli_output *output, const void *data, size_t size, ckd_error *err);
/*
 * Syncs the file, renames it (replacing an existing file only with `force`), and syncs the directory. Always frees it.
 */
ckd_status cli_output_commit(cli_output *output, ckd_error *err);
/* Does all of this for bytes in memory. */
ckd_status cli_output_bytes(const char *path, bool force, const void *data, size_t size, ckd_error *err);
/* Makes the names in a folder durable. */
ckd_status cli_output_sync_folder(const char *path, ckd_error *err);
/* Removes the temporary file. Accepts NULL. */
void cli_output_drop(cli_output *output);

#endif
