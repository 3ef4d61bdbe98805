/*
 * A folder that appears complete or not at all. Files are written into .FOLDER.tmp-PID beside it, which is renamed when
 * all of them are durable. Dropping it leaves nothing behind.
 */
#ifndef CLI_OUTPUT_FOLDER_H
#define CLI_OUTPUT_FOLDER_H

#include "cli/output/errors.h"

typedef struct cli_folder cli_folder;

/* May a file with this name inside the folder be replaced? `folder`: the name is a folder. */
typedef bool (*cli_replaceable_fn)(const char *name, bool folder);

/*
 * EXISTS unless `path` is free or an empty folder. With `replaceable`, a folder that holds only replaceable files is
 * allowed, too. Call it before any work.
 */
ckd_status cli_folder_check(const char *path, cli_replaceable_fn replaceable, ckd_error *err);
/* Creates the parent folders and the temporary folder. NOSPACE unless the file system has `size` bytes left. */
ckd_status cli_folder_open(cli_folder **out, const char *path, cli_replaceable_fn replaceable, uint64_t size,
                           ckd_error *err);
/*
 * Returns the path of a future file in the folder; free() it. Creates folders in between. NULL, with an error, on
 * failure.
 */
char *cli_folder_inside(const cli_folder *folder, const char *name, ckd_error *err);
/* Renames the folder to its final name, replacing what cli_folder_check allows. Always frees it. */
ckd_status cli_folder_commit(cli_folder *folder, ckd_error *err);
/* Removes everything. Accepts NULL. */
void cli_folder_drop(cli_folder *folder);

#endif
