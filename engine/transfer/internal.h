/* Declarations that only the files of engine/transfer/ use. */
#ifndef ENGINE_TRANSFER_INTERNAL_H
#define ENGINE_TRANSFER_INTERNAL_H

#include "engine/transfer/transfer.h"

/*
 * Reads what the destination has, and discards an older plan. Except in a dry run, the caller holds the destination's
 * publish lock and mutex, and its catalog is in step.
 */
ckd_status transfer_read_destination(transfer *t, ckd_error *err);
/*
 * Fills items from both lists, and refuses names that conflict. The caller holds the source's reader lock, but not the
 * destination's mutex: the source's mutex is taken here, and a copy in the other direction would take both in the other
 * order.
 */
ckd_status transfer_plan(transfer *t, ckd_error *err);
/*
 * Fills files, parts and total from the items. The caller holds the reader locks of both stores, so existing files
 * stay.
 */
ckd_status transfer_plan_files(transfer *t, ckd_error *err);
void transfer_plan_free(transfer *t); /* frees the whole plan */
transfer_file *transfer_find_file(const transfer *t, const ckd_id *id);
const transfer_item *transfer_find_item(const transfer *t, const ckd_id *id);
/* Fails if a run of the copy is being renamed in the destination, under its publish lock. Errors: BUSY, IO, NOMEM. */
ckd_status transfer_check_runs(const transfer *t, ckd_error *err);
/* Fails with EXISTS if the copy has another name for a checkpoint that the destination has. name: its source's. */
ckd_status transfer_check_present(const transfer *t, const char *name, const ckd_checkpoint *existing,
                                  ckd_error *err);
static inline bool transfer_moves(const transfer_item *item) {
    return item->state == CKD_COPY_MOVED;
}

/* Leaves out an item that cannot be copied; the others are still copied. */
void transfer_skip(transfer *t, transfer_item *item, ckd_status status, const ckd_error *why);

/* ---- parts.c ---- */
/*
 * Finds the records that the items need from files that the destination lacks. If they are only a part of a file, the
 * manifests name a new file with this part instead. Items whose records are damaged are left out. Errors: IO, NOMEM.
 */
ckd_status transfer_choose_parts(transfer *t, ckd_error *err);
const transfer_part *transfer_find_part(const transfer *t, const ckd_id *id); /* NULL: there is none */
void transfer_parts_free(transfer *t);

/* ---- damage.c ---- */
bool transfer_has_damage_of(const damaged_part *list, const ckd_id *checkpoint);
/* Adds damage to a record of a checkpoint, unless the list has that checkpoint. Errors: NOMEM. */
ckd_status transfer_record_damage(damaged_part **list, const ckd_id *checkpoint, const ckd_error *why,
                                  ckd_error *err);
void transfer_damage_free(damaged_part **list);
/* Finds damage to records that the item needs. *damaged NULL: there is none. Errors: NOMEM. */
ckd_status transfer_find_damaged(const damaged_part **damaged, const transfer *t, const damaged_part *list,
                                 transfer_item *item, ckd_error *err);

/* ---- fetch.c ---- */
/* Adds the item and the source to an error message about damage. */
ckd_status transfer_explain_damage(const transfer *t, const transfer_item *item, ckd_status status,
                                   ckd_error *err);
pathname transfer_path(const transfer *t, const ckd_id *file); /* in data/x */
/*
 * Copies the file to data/x of the destination, complete, durable and verified, unless data/c has it undamaged.
 * CORRUPT: the file, or a record that the item needs, is damaged.
 */
ckd_status transfer_fetch_file(transfer *t, transfer_file *f, transfer_item *item, ckd_error *err);
/* Copies a file that is damaged or missing in data/c to data/x, whole. CORRUPT: it is damaged in the source, too. */
ckd_status transfer_refetch_file(transfer *t, transfer_file *f, const transfer_item *item, ckd_error *err);
/*
 * Checks that the file in data/c of the destination is the one that the manifest names. all: checks every record;
 * otherwise only header, index and footer.
 */
ckd_status transfer_check_destination(transfer *t, const transfer_file *f, bool all, ckd_error *err);
/* Checks that the source has this file, by header, index and footer. Errors: CORRUPT. */
ckd_status transfer_check_source(const transfer *t, const transfer_file *f, const transfer_item *item,
                                 ckd_error *err);

/* ---- destination_repair.c ---- */
/*
 * Checks the files of items in this state (PRESENT or RESTORED) in the destination, and copies those that are damaged
 * or missing there. Items whose files the source cannot replace become LEFT. The caller holds the destination's reader
 * lock, and not its publish lock. With dry_run it only counts.
 */
ckd_status transfer_repair_destination(transfer *t, ckd_copy_state state, ckd_error *err);
/*
 * Gives an intact file that arrived its name, durably. A file that has this name is put aside. The caller holds the
 * publish lock.
 */
ckd_status transfer_replace(const transfer *t, const transfer_file *f, ckd_error *err);
/*
 * Leaves out items in the destination's trash that ckd_store_undelete would refuse, so that the others are restored.
 * Errors: as undelete_check.
 */
ckd_status transfer_skip_blocked(transfer *t, ckd_error *err);
/*
 * Restores the RESTORED items from the destination's trash, repaired. Items that cannot be restored become LEFT. The
 * caller holds the destination's reader lock, and not its publish lock.
 */
ckd_status transfer_restore(transfer *t, ckd_error *err);

/* ---- result.c ---- */
/* Sets total, and the bytes that each item adds: planned before the copy, actual after it. Errors: NOMEM. */
ckd_status transfer_count_bytes(transfer *t, ckd_error *err);
ckd_status transfer_result(ckd_copy_result **out, transfer *t, ckd_error *err);
/* Returns CKD_OK, or the error of the first checkpoint that was left out. */
ckd_status transfer_skipped(const transfer *t, ckd_error *err);

#endif
