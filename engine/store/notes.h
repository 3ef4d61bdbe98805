/*
 * The notes in data/n, which say what a store is to keep and to cover by parity: pins, tags, policies and parity settings. codec/FORMAT.md, "What is kept". Internal to engine/.
 *
 * Each has a name and generations, of which the highest counts, readable or not: a lower one is what it said before. Notes change only under the
 * publish lock; who reads them without it tries again when one has gone meanwhile.
 */
#ifndef ENGINE_NOTES_H
#define ENGINE_NOTES_H

#include "engine/store/needs.h"

typedef struct kept_note {
    note_name name;
    ckd_status status; /* CKD_OK, or why it cannot be read: then only the name is known */
    pin_note pin;      /* the one that the name says */
    tag_note tag;
    policy_note policy;
    parity_note parity;
} kept_note;

typedef struct notes {
    kept_note *items; /* by kind, then name; of each the highest generation */
    size_t count;
} notes;

/* All notes, those that cannot be read included. Release with notes_free, also after failures. Errors: IO (the folder), NOMEM. */
ckd_status notes_read(notes *out, const ckd_store *store, ckd_error *err);
/* Only those of one kind: the others' files are not read. */
ckd_status notes_read_kind(notes *out, const ckd_store *store, note_kind kind, ckd_error *err);
void notes_free(notes *n);
/* NULL: there is none. */
const kept_note *notes_find(const notes *n, note_kind kind, const char *name);
/* Why a note cannot be read, naming its file; CKD_OK: it can. */
ckd_status notes_why(const kept_note *note, const ckd_store *store, ckd_error *err);
/* The same of the first that cannot: what it keeps is not known, so nothing may be deleted. */
ckd_status notes_check(const notes *n, const ckd_store *store, ckd_error *err);
/* Which of CKD_KEPT_PINNED and CKD_KEPT_TAGGED are true of a checkpoint. */
unsigned notes_keep(const notes *n, const ckd_id *checkpoint);
/* The policy of a run: its own, else that of all others; also one that cannot be read. NULL: there is none. */
const kept_note *notes_policy(const notes *n, const char *run);
/* The same of how its chunk files are to be covered by parity. */
const kept_note *notes_parity(const notes *n, const char *run);
/* STATE, and what to do about it, if a chosen checkpoint is pinned or tagged. CORRUPT and others: as notes_check. */
ckd_status notes_check_chosen(const ckd_store *store, const needs *chosen, ckd_error *err);

/*
 * Changes, under the publish lock. Publishes the note that `encoded` holds, durably, and takes away what it said before. A failure may leave the one or
 * the other.
 */
ckd_status notes_publish(const ckd_store *store, const note_name *name, const bytes *encoded, ckd_error *err);
/* NOT_FOUND without a message about what is missing; UNSUPPORTED: it means something to a newer version. One that is damaged goes. */
ckd_status notes_remove(const ckd_store *store, note_kind kind, const char *name, ckd_error *err);
/*
 * The name that the next note about something gets. `before` (zeroed if there is none) is what it says now. Errors: UNSUPPORTED (the note
 * there is of a newer version, and must not be replaced), INVALID (no generation is left), IO, NOMEM.
 */
ckd_status notes_next(note_name *out, kept_note *before, const ckd_store *store, note_kind kind,
                      const char *name, ckd_error *err);

#endif
