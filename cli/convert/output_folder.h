/*
 * A folder that appears complete or not at all: files are written into .FOLDER.tmp-PID beside it, which gets its name when all of
 * them are durable. Nothing is left behind when it is dropped.
 */
#ifndef CLI_OUTPUT_FOLDER_H
#define CLI_OUTPUT_FOLDER_H

#include "cli/output/errors.h"

typedef struct cli_folder cli_folder;

/* Is a file with this name, inside the folder, one that may be replaced? `folder`: it is a folder itself. */
typedef bool (*cli_replaceable_fn)(const char *name, bool folder);

/*
 * EXISTS if something stands at `path` that is not an empty folder; with `replaceable` also a folder of nothing else than
 * such files will do. Asked first of all.
 */
ckd_status cli_folder_check(const char *path, cli_replaceable_fn replaceable, ckd_error *err);
/* Creates the folders above it and the temporary one. NOSPACE unless there are `size` bytes left on the file system. */
ckd_status cli_folder_open(cli_folder **out, const char *path, cli_replaceable_fn replaceable, uint64_t size,
                           ckd_error *err);
/* The path of a file that is to be in it; free() it. Folders in between are created. NULL, and an error, on failure. */
char *cli_folder_inside(const cli_folder *folder, const char *name, ckd_error *err);
/* Gives it its name, in the place of what cli_folder_check allows to be there. Frees it in any case. */
ckd_status cli_folder_commit(cli_folder *folder, ckd_error *err);
/* Removes all of it; accepts NULL. */
void cli_folder_drop(cli_folder *folder);

#endif
