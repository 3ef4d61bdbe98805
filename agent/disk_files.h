/* Files of snapshots on a local disk. Shared by disk_copies.c, which decides, and disk_files.c. */
#ifndef AGENT_DISK_FILES_H
#define AGENT_DISK_FILES_H

#include "agent/internal.h"

#define PATH_BYTES 1200

typedef struct path_text {
    char text[PATH_BYTES];
} path_text;
/* A file in the disk's folder or, with a name, below a folder there. */
path_text disk_path(const local_disk *d, const char *snapshot, const char *name);

typedef struct number_text {
    char text[24];
} number_text;
/* Name and number of a snapshot's folder. 0: the name is none. */
number_text disk_number_text(uint64_t snapshot);
uint64_t disk_number_from(const char *name);

/*
 * Links what the disk lacks, and sets d->names and d->states. No save is under way meanwhile. Errors: NOMEM, IO and
 * NOSPACE of the memory's folder.
 */
ckd_status disk_link_files(local_disk *d, ckd_error *err);
void disk_forget_links(local_disk *d);
/* Errors: CANCELLED (the agent is ending), IO, NOSPACE. */
ckd_status disk_write_snapshot(local_disk *d, uint64_t number, ckd_error *err);
/* Removes all snapshots but this one, and the rest of what a killed agent was making or removing. */
void disk_remove_others(const local_disk *d, uint64_t kept);

#endif
