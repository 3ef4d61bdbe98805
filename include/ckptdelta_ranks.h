/*
 * ckptdelta, many ranks: who writes and who reads which part of a checkpoint. Part of ckptdelta.h, which includes it;
 * the same conventions hold.
 *
 *   each rank:   ckd_ranks_plan plans with the other ranks; the rank saves the tensors that ckd_plan_writes names
 *
 * Planning is arithmetic on descriptions. It needs no store, no file and no values. ckd_plan_describe and ckd_plan_make
 * do it in one process that knows what all ranks hold.
 */
#ifndef CKPTDELTA_RANKS_H
#define CKPTDELTA_RANKS_H

#include "ckptdelta.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CKD_WORLD_MAX 65536 /* largest number of ranks in a plan */

/* Bytes that the caller carries between ranks. Release with ckd_bytes_free. */
typedef struct ckd_bytes {
    void *data;
    size_t size;
} ckd_bytes;
CKD_API void ckd_bytes_free(ckd_bytes *b);

/* -------------------------------------------------------------------------------------------------------- plan */

/*
 * Describes what one rank holds: name, role, dtype, global shape and region of each tensor. data is ignored. Ranks may
 * hold the same region (replicas), nothing of a tensor, or an empty region of it. Only the same version of the library
 * can read the bytes. They depend only on the description. Errors: INVALID and MISMATCH (a name, shape or region that
 * makes no sense; err->tensor names the tensor), NOMEM.
 */
CKD_API ckd_status ckd_plan_describe(ckd_bytes *out, uint32_t rank, uint32_t world, const ckd_tensor *tensors,
                                     size_t count, ckd_error *err);

typedef struct ckd_plan ckd_plan; /* immutable, so any number of threads may query it */

/*
 * Plans a save by `world` ranks from all their descriptions, in any order. Each region is written once, however many
 * ranks hold it. The rank with the least to write takes it. Moments and masters go to the rank that writes their
 * weights, if the same ranks hold the same regions of both. Takes O(n log n) time for n regions. Errors: MISMATCH
 * (ranks disagree about a tensor; regions overlap without being equal, leave a gap, or exceed the tensor: the message
 * names ranks and elements, err->tensor the tensor), INVALID (a description is missing, duplicate, or of another
 * world), CORRUPT, UNSUPPORTED (from another version), NOMEM.
 */
CKD_API ckd_status ckd_plan_make(ckd_plan **out, const ckd_bytes *descriptions, uint32_t world,
                                 ckd_error *err);
CKD_API void ckd_plan_free(ckd_plan *plan);

/*
 * Returns whether the rank writes the tensor at `index` of its description. 0 also for ranks and tensors outside the
 * plan.
 */
CKD_API int ckd_plan_writes(const ckd_plan *plan, uint32_t rank, size_t index);
typedef struct ckd_plan_summary {
    uint32_t world;
    uint64_t tensors;
    uint64_t regions;  /* described by all ranks */
    uint64_t written;  /* regions that are written */
    uint64_t replicas; /* regions left out because another rank writes them */
    uint64_t empty;    /* regions left out because they have no elements */
    uint64_t raw_bytes;
    uint64_t min_bytes, max_bytes; /* smallest and largest load of a rank */
} ckd_plan_summary;
CKD_API ckd_plan_summary ckd_plan_summarise(const ckd_plan *plan);

/* ------------------------------------------------------------------------------- saving together, one commit */

/*
 * Processes that save one checkpoint together. Each calls the same functions in the same order with its own tensors. A
 * failure on one rank fails the call on all of them, and no checkpoint results. Only one thread may use a group at a
 * time. A process usually has one group per store; several are possible.
 */
typedef struct ckd_ranks ckd_ranks;

/* Several memory areas, taken as one sequence of bytes. */
typedef struct ckd_buffers {
    const ckd_bytes *items;
    size_t count;
} ckd_buffers;

/*
 * How bytes travel between the ranks, if not through the store's directory. Rank 0 coordinates. All functions except
 * `leave` are collective, and all ranks call them in the same order. A failure ends the group. The rank that failed
 * calls none of them again, and the transport must make the others fail, too, instead of letting them wait. Saves need
 * `gather` and `broadcast`; collective loads need `exchange` and `all_reduce_min`. Functions that are not needed may be
 * NULL.
 */
typedef struct ckd_transport {
    size_t struct_size;
    void *context;
    uint32_t rank, world;
    /*
     * Sends the bytes of every rank to rank 0. There all[r] receives the malloc'ed bytes of rank r, its own included.
     * all is NULL on other ranks.
     */
    ckd_status (*gather)(void *context, const ckd_bytes *mine, ckd_bytes *all, ckd_error *err);
    /* Sends rank 0's bytes to all other ranks, which receive them malloc'ed. */
    ckd_status (*broadcast)(void *context, ckd_bytes *data, ckd_error *err);
    void (*leave)(void *context); /* ends the use; may be NULL */
    /*
     * Sends bytes from each rank to each other one. The buffers of out[r] go to rank r, into in[this rank] there, which
     * has exactly their total size. out[this rank] is ignored. Any of them may be empty. It must not fail for lack of
     * memory.
     */
    ckd_status (*exchange)(void *context, const ckd_buffers *out, const ckd_bytes *in, ckd_error *err);
    /* Sets *number to the minimum over all ranks. It must not fail for lack of memory. */
    ckd_status (*all_reduce_min)(void *context, uint64_t *number, ckd_error *err);
} ckd_transport;
#define CKD_TRANSPORT_INIT \
    { .struct_size = sizeof(ckd_transport) }

typedef struct ckd_ranks_options {
    size_t struct_size;
    uint32_t rank, world; /* world 0: 1 */
    /* Identifies one launch: the same text on all its ranks, a different one for each launch; NULL: "" */
    const char *group;
    /* how long to wait for live ranks that are late; 0: 600000. Death is noticed at once. */
    uint32_t timeout_ms;
    /* NULL: files in the store's directory, without a communication library */
    const ckd_transport *transport;
} ckd_ranks_options;
#define CKD_RANKS_OPTIONS_INIT \
    { .struct_size = sizeof(ckd_ranks_options) }

/*
 * Joins a group. Returns when all ranks have joined. The store must be open for writing, and must outlive the group.
 * Through the store's directory, each rank shows that it is alive by holding a lock on a file of its own. The lock
 * lasts until the rank leaves, dies, or cannot write a message (on a full disk), which ends the group. Forked children
 * that do not exec also hold the lock. Errors: BUSY (not all ranks came in time; the message names them), STATE (a rank
 * joined, then died or left before all had joined), INVALID, READ_ONLY, IO, NOMEM.
 */
CKD_API ckd_status ckd_ranks_join(ckd_ranks **out, ckd_store *store, const ckd_ranks_options *options,
                                  ckd_error *err);
/* Leaves the group. Rank 0 waits until the others have left. Accepts NULL. */
CKD_API void ckd_ranks_leave(ckd_ranks *ranks);

/*
 * Returns the plan for the tensors that all ranks hold now. If the group made this plan before, no descriptions are
 * exchanged. Collective. The group owns the plan, which lives until four others have been made. Errors: those of
 * ckd_plan_describe and ckd_plan_make, of any rank, the same on all.
 */
CKD_API ckd_status ckd_ranks_plan(const ckd_plan **out, ckd_ranks *ranks, const ckd_tensor *tensors,
                                  size_t count, ckd_error *err);
/*
 * Calls ckd_save_begin on all ranks, and sets rank and world. checkpoint_id is that of rank 0, or a new one if that is
 * zero. All other options must be the same on all ranks, except `metric`, total_bytes, the progress callback and
 * staging_bytes. A rank may omit metric_name; rank 0's metric is recorded. Collective. The save ends with
 * ckd_ranks_commit or ckd_ranks_abort. Errors: INVALID on all ranks, before anything is written, if an option differs
 * (the message names rank and option); those of ckd_save_begin, of any rank.
 *
 * Before the commit, ckd_save_tensor and ckd_save_blob check the other ranks about ten times a second. They fail
 * (STATE, naming the rank) as soon as a rank has died or left without delivering its part, or the group has ended for
 * another reason. This works only through the store's directory, not with another transport.
 */
CKD_API ckd_status ckd_ranks_begin(ckd_save **out, ckd_ranks *ranks, const ckd_save_options *options,
                                   ckd_error *err);
/*
 * Makes the save durable on all ranks and commits it. Collective. Frees the save, also on failure; then no rank's part
 * remains and no checkpoint exists. info may be NULL.
 *
 * If a rank dies before its part is durable, the others fail (STATE) as soon as they notice. If rank 0 dies during the
 * commit, the others find out whether it completed. On a timeout they give the save up, and rank 0 can no longer commit
 * it. If rank 0 is committing at that moment, they wait for the result. Only a rank that can neither write to the
 * store's directory nor lock it reports an unknown outcome.
 *
 * Errors: those of ckd_save_commit, of any rank; BUSY (a rank is alive but late).
 */
CKD_API ckd_status ckd_ranks_commit(ckd_checkpoint *info, ckd_ranks *ranks, ckd_save *save, ckd_error *err);
/*
 * A rank that failed after ckd_ranks_begin calls this instead of ckd_ranks_commit. The other ranks' commits fail with
 * `why` (not NULL), which is returned.
 */
CKD_API ckd_status ckd_ranks_abort(ckd_ranks *ranks, ckd_save *save, const ckd_error *why);

/*
 * Lists tensors that the parent lacks, or has with another dtype or shape, and that were therefore saved without it.
 * For a base: all tensors. A different layout does not matter, because shards are coded against whatever the parent has
 * there. Release with ckd_tensor_list_free. Errors: NOT_FOUND (the parent was deleted), CORRUPT (the
 * tensors of either cannot be read), those of ckd_store_tensors.
 */
CKD_API ckd_status ckd_store_tensors_without_parent(ckd_tensor_list **out, ckd_store *store,
                                                    const ckd_id *checkpoint, ckd_error *err);

/* Plans, begins, saves what this rank writes, and commits. Errors: all the above. */
CKD_API ckd_status ckd_ranks_save(ckd_checkpoint *info, ckd_ranks *ranks, const ckd_save_options *options,
                                  const ckd_tensor *tensors, size_t count, ckd_error *err);

/* --------------------------------------------------------------- the same by hand: parts instead of a group */

/*
 * Each rank calls ckd_save_begin with its rank, the world and the coordinator's checkpoint_id, saves its regions, and
 * seals the save. The caller transports the parts to the coordinator.
 */

/* Describes what one rank wrote, in bytes that the caller carries to the coordinator. Release with ckd_part_free. */
typedef struct ckd_part {
    void *data;
    size_t size;
} ckd_part;
/* Makes this rank's file durable and describes it. The save stays open; its lock shows that the rank is alive. */
CKD_API ckd_status ckd_save_seal(ckd_part *out, ckd_save *save, ckd_error *err);
/*
 * Coordinator: commits the parts of all ranks, its own included. Frees the save like ckd_save_commit. Errors: those of
 * ckd_save_commit; INVALID (a part of another save, or of a rank with different options, compared as in
 * ckd_ranks_begin: nothing is committed, and the message names rank and option); CORRUPT and UNSUPPORTED (bytes that
 * are no part).
 */
CKD_API ckd_status ckd_save_publish(ckd_checkpoint *info, ckd_save *save, const ckd_part *parts, size_t count,
                                    ckd_error *err);
/* Other ranks, after the coordinator has published: frees the save and leaves its file in place. */
CKD_API void ckd_save_end(ckd_save *save);
CKD_API void ckd_part_free(ckd_part *part);

/* ------------------------------------------------------------------------------- loading together */

/*
 * Runs ckd_load_all on all ranks of a transport at once. Each rank has its own load of the same checkpoint and its own
 * requests, possibly none. If several ranks need a block, the one with the least to read reads it, verifies it and
 * sends it to the others. They verify and decode it as if they had read it. All ranks together thus read each stored
 * byte once. Every rank reads the indexes of files, and whole files of up to 256 KiB with them.
 *
 * Ranks go through the checkpoint in rounds. In each, a rank receives at most an eighth of its staging_bytes
 * (ckd_load_options; at least one block) as stored payloads, and reads at most as much for others. It keeps up to
 * another eighth for later rounds. Half remains for decoded values as usual. A payload that does not fit because it is
 * needed again much later is read again by the rank that needs it.
 *
 * A failure on one rank fails the call on all of them, with the same error, which names that rank. Differences are
 * found on all ranks before anything is written on any. UNEXPECTED means that no rank asks for a tensor; it passes if
 * all ranks allow it. ckd_load_bytes_read returns what this rank has read. Values for devices are assembled in host
 * memory, for all of a rank's requests, and copied when all ranks are done. That copy can fail on one rank alone. Ranks
 * that share only a file system and have no transport call ckd_load_all; each then reads what it needs.
 *
 * Collective; all ranks must use the same version of the library. `transport` needs `exchange` and `all_reduce_min`,
 * and is used only during the call. Errors: those of ckd_load_all, of any rank; INVALID (the ranks load different
 * checkpoints, or the transport lacks a function; the latter is found without the other ranks); those of the transport,
 * which must not be used after that.
 */
CKD_API ckd_status ckd_load_all_together(ckd_load *load, const ckd_transport *transport,
                                         const ckd_load_request *requests, size_t count, unsigned allowed,
                                         ckd_error *err);

#ifdef __cplusplus
}
#endif
#endif
