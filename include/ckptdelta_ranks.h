/*
 * ckptdelta, many ranks: who writes what, and who reads it. Part of ckptdelta.h, which includes it; the same conventions hold.
 *
 *   each rank:   ckd_ranks_plan plans together with the others; of its tensors it saves those that ckd_plan_writes says
 *
 * Planning is arithmetic on descriptions: no store, no file, no values. ckd_plan_describe and ckd_plan_make do it in one
 * process, for who has what all ranks hold.
 */
#ifndef CKPTDELTA_RANKS_H
#define CKPTDELTA_RANKS_H

#include "ckptdelta.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CKD_WORLD_MAX 65536 /* ranks of a plan */

/* Bytes that the caller carries from rank to rank. Release with ckd_bytes_free. */
typedef struct ckd_bytes {
    void *data;
    size_t size;
} ckd_bytes;
CKD_API void ckd_bytes_free(ckd_bytes *b);

/* -------------------------------------------------------------------------------------------------------- plan */

/*
 * What one rank holds: of each tensor its name, role, dtype, global shape and region; data is not looked at. Ranks may
 * hold the same region (replicas), nothing of a tensor, or an empty region of it. The bytes are for the same version
 * of the library, and depend on nothing but what is described. Errors: INVALID and MISMATCH (a name, shape or
 * region that makes no sense; err->tensor says whose), NOMEM.
 */
CKD_API ckd_status ckd_plan_describe(ckd_bytes *out, uint32_t rank, uint32_t world, const ckd_tensor *tensors,
                                     size_t count, ckd_error *err);

typedef struct ckd_plan ckd_plan; /* never changes once made: any number of threads may ask it */

/*
 * The plan of a save by `world` ranks from all their descriptions, in any order. Each region is written once, however
 * many ranks hold it: by the one that has least to write; moments and masters by the rank that writes their weights, where the
 * same ranks hold the same regions of them. In time n log n for n regions.
 * Errors: MISMATCH (ranks disagree about a tensor, regions overlap without being equal, leave something out or do not
 * lie in the tensor: the message names ranks and elements, err->tensor the tensor), INVALID (a description is missing, there
 * twice, or of another world), CORRUPT, UNSUPPORTED (of another version), NOMEM.
 */
CKD_API ckd_status ckd_plan_make(ckd_plan **out, const ckd_bytes *descriptions, uint32_t world,
                                 ckd_error *err);
CKD_API void ckd_plan_free(ckd_plan *plan);

/* Does the rank write the tensor that stands at `index` in its description? 0 also for ranks and tensors that the plan does not have. */
CKD_API int ckd_plan_writes(const ckd_plan *plan, uint32_t rank, size_t index);
typedef struct ckd_plan_summary {
    uint32_t world;
    uint64_t tensors;
    uint64_t regions;  /* described by all ranks */
    uint64_t written;  /* of these */
    uint64_t replicas; /* left out, as another rank writes them */
    uint64_t empty;    /* left out, as they have no elements */
    uint64_t raw_bytes;
    uint64_t least_bytes, most_bytes; /* of a rank */
} ckd_plan_summary;
CKD_API ckd_plan_summary ckd_plan_summarise(const ckd_plan *plan);

/* ------------------------------------------------------------------------------- saving together, one commit */

/*
 * Processes that save one checkpoint together. Each calls the same functions in the same order, with its own tensors; what one of them
 * cannot do fails on all of them, and then there is no checkpoint. One thread at a time; one group per process and store at a time is usual,
 * more are possible.
 */
typedef struct ckd_ranks ckd_ranks;

/* Several stretches of memory, one after the other. */
typedef struct ckd_pieces {
    const ckd_bytes *items;
    size_t count;
} ckd_pieces;

/*
 * How bytes travel between the ranks, if not through the store's directory. Rank 0 coordinates. All functions but `leave` are collective,
 * and called in the same order everywhere. A failure of one ends the group: the rank on which it failed calls none any more, and the
 * transport sees to it that the others fail, too, instead of waiting for it. To save, `gather` and `broadcast` are needed; to load
 * together, `exchange` and `least`; what is not needed may be NULL.
 */
typedef struct ckd_transport {
    size_t struct_size;
    void *context;
    uint32_t rank, world;
    /* Everybody's bytes to rank 0, where all[r] becomes those of rank r (malloc'ed, also its own); elsewhere all is NULL. */
    ckd_status (*gather)(void *context, const ckd_bytes *mine, ckd_bytes *all, ckd_error *err);
    /* Bytes of rank 0 to everybody else, where they are malloc'ed. */
    ckd_status (*broadcast)(void *context, ckd_bytes *data, ckd_error *err);
    void (*leave)(void *context); /* at the end; may be NULL */
    /*
     * From each rank to each other one: the pieces of out[r] go to rank r, into in[this rank] there, which is room for as many bytes as they
     * are together. What they are for itself is not looked at. Any of them may have no bytes. It must not fail for want of memory.
     */
    ckd_status (*exchange)(void *context, const ckd_pieces *out, const ckd_bytes *in, ckd_error *err);
    /* *number becomes the least of all ranks'. Nor must this fail for want of memory. */
    ckd_status (*least)(void *context, uint64_t *number, ckd_error *err);
} ckd_transport;
#define CKD_TRANSPORT_INIT \
    { .struct_size = sizeof(ckd_transport) }

typedef struct ckd_ranks_options {
    size_t struct_size;
    uint32_t rank, world; /* world 0: 1 */
    const char *
        group; /* which processes belong together: the same text for all ranks of one launch, another one for each launch; NULL: "" */
    uint32_t
        timeout_ms; /* how long to wait for ranks that live and do not come; 0: 600000. Death is noticed at once */
    const ckd_transport
        *transport; /* NULL: files in the store's directory, without any communication library */
} ckd_ranks_options;
#define CKD_RANKS_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_ranks_options) }

/*
 * Joins; returns when all ranks have. The store must be open for writing, and outlive the group. Through the store's directory each rank holds a
 * lock on a file of its own, by which the others see that it lives, until it leaves or dies (with all children that it has forked meanwhile and that did not
 * exec: they hold the lock, too). Errors: BUSY (not all ranks came in time;
 * the message says which), STATE (one was there, and died or left before all were), INVALID, READ_ONLY, IO, NOMEM.
 */
CKD_API ckd_status ckd_ranks_join(ckd_ranks **out, ckd_store *store, const ckd_ranks_options *options,
                                  ckd_error *err);
/* Leaves; rank 0 waits until the others have. Accepts NULL. */
CKD_API void ckd_ranks_leave(ckd_ranks *ranks);

/*
 * The plan for what all ranks hold now; found without exchanging descriptions if it was made before. Collective. The plan is the group's,
 * and lives until four others were made. Errors: those of ckd_plan_describe and ckd_plan_make, of any rank, the same on all.
 */
CKD_API ckd_status ckd_ranks_plan(const ckd_plan **out, ckd_ranks *ranks, const ckd_tensor *tensors,
                                  size_t count, ckd_error *err);
/*
 * ckd_save_begin on all ranks: rank, world and checkpoint_id are set here. All other options must be the same on all ranks, except `metric`,
 * total_bytes, the progress callback and staging_bytes. A rank may leave out metric_name; rank 0's metric is recorded. Collective.
 * Errors: INVALID on all ranks, before anything is written, if an option differs (the message names rank and option); those of
 * ckd_save_begin, of any rank. It then ends with one of the two calls that follow.
 *
 * Meanwhile ckd_save_tensor and ckd_save_blob look at the other ranks about ten times a second, and fail (STATE, naming the rank) as soon as one has
 * died or left whose part is missing, or as the group is over for another reason. Only through the store's directory, not with another transport.
 */
CKD_API ckd_status ckd_ranks_begin(ckd_save **out, ckd_ranks *ranks, const ckd_save_options *options,
                                   ckd_error *err);
/*
 * Makes the save durable on all ranks and commits it. Collective. Frees the save, also on failure: then no rank's part is left, and there is no
 * checkpoint. A rank that dies before its part is durable is an error on the others (STATE), as soon as it is noticed. If rank 0 dies in the commit, the others
 * find out whether it came to its end. When time is over they give the save up, and rank 0 can commit it no more; if it is committing just then, they wait for the
 * end of that. Only a rank that can neither write to the store's directory nor lock it says in its error that it was not told.
 * info may be NULL. Errors: those of ckd_save_commit, of any rank; BUSY (a rank lives and does not come in
 * time).
 */
CKD_API ckd_status ckd_ranks_commit(ckd_checkpoint *info, ckd_ranks *ranks, ckd_save *save, ckd_error *err);
/* Instead, on a rank that failed in between: the others' commits fail with `why` (not NULL), which is returned. */
CKD_API ckd_status ckd_ranks_abort(ckd_ranks *ranks, ckd_save *save, const ckd_error *why);

/*
 * Tensors of a checkpoint that its parent does not have, or with another dtype or shape: they were saved without it. Of a base
 * all of them. Another layout is no reason: shards are coded against whatever the parent has there. Release with ckd_tensor_list_free.
 * Errors: NOT_FOUND (the parent was deleted), those of ckd_store_tensors.
 */
CKD_API ckd_status ckd_store_tensors_without_parent(ckd_tensor_list **out, ckd_store *store,
                                                    const ckd_id *checkpoint, ckd_error *err);

/* All of it: plans, begins, saves what this rank is to write, commits. Errors: all the above. */
CKD_API ckd_status ckd_ranks_save(ckd_checkpoint *info, ckd_ranks *ranks, const ckd_save_options *options,
                                  const ckd_tensor *tensors, size_t count, ckd_error *err);

/* --------------------------------------------------------------- the same by hand: parts instead of a group */

/*
 * Each rank calls ckd_save_begin with its rank, the world and the coordinator's checkpoint_id, saves its regions, and seals. How parts travel
 * to the coordinator is the caller's matter.
 */

/* What one rank wrote, as bytes that the caller carries to the coordinator. Release with ckd_part_free. */
typedef struct ckd_part {
    void *data;
    size_t size;
} ckd_part;
/* Makes this rank's file durable and describes it. The save stays open (its lock tells that the rank lives). */
CKD_API ckd_status ckd_save_seal(ckd_part *out, ckd_save *save, ckd_error *err);
/*
 * Coordinator: commits with the parts of all ranks, its own included. Frees the save like ckd_save_commit. Errors: those of
 * ckd_save_commit; INVALID (a part of another save, or of a rank that was given other options, as ckd_ranks_begin compares them:
 * nothing is committed, and the message names rank and option); CORRUPT and UNSUPPORTED (bytes that are no part).
 */
CKD_API ckd_status ckd_save_publish(ckd_checkpoint *info, ckd_save *save, const ckd_part *parts, size_t count,
                                    ckd_error *err);
/* Other ranks, after the coordinator has published: frees the save and keeps the file. */
CKD_API void ckd_save_end(ckd_save *save);
CKD_API void ckd_part_free(ckd_part *part);

/* ------------------------------------------------------------------------------- loading together */

/*
 * ckd_load_all by all ranks of a transport at once, each with its own load of the same checkpoint and its own requests, possibly none. What
 * several ranks need is read by one of them, verified, and sent to the others, which verify and decode it as if they had read it: each
 * stored byte is read once by all ranks together. Of those that need a block, the one that has least to read reads it. Indexes of files, and
 * files of up to 256 KiB with them, are read by every rank.
 *
 * Ranks go through the checkpoint in rounds. In each a rank receives, and reads for others, at most an eighth of its staging_bytes
 * (ckd_load_options; at least one block), as stored; up to a quarter of them it holds for later rounds; half are as ever for decoded values. What
 * does not fit, because it is needed again much later, is read again by the rank that needs it.
 *
 * What fails on one rank fails on all, with the same error, which says whose it is; differences are found on all ranks
 * before anything is written on any. UNEXPECTED is what no rank asks for; it passes if all ranks allow it. ckd_load_bytes_read says what this rank has read.
 * What is to lie on devices is put together in host memory, all of a rank's at once, and written there when all ranks are through; that can fail on one rank alone.
 * Ranks that share nothing but a file system, with no transport between them, call ckd_load_all: each then reads what it needs.
 *
 * Collective; all ranks use the same version of the library. `transport` must have `exchange` and `least`, and is used during the call only. Errors: those of ckd_load_all, of any rank;
 * INVALID (another checkpoint than the other ranks', a transport that lacks something: that one is found without the other ranks); the transport's, after
 * which it is not to be used any more.
 */
CKD_API ckd_status ckd_load_all_together(ckd_load *load, const ckd_transport *transport,
                                         const ckd_load_request *requests, size_t count, unsigned allowed,
                                         ckd_error *err);

#ifdef __cplusplus
}
#endif
#endif
