/*
 * A save in progress. Internal to engine/.
 *
 *   begin.c         where it goes (run, branch, duplicate), what it builds on, intent, chunk file
 *   tensor.c        tensors and blobs as they are given
 *   launch_check.c  that no other launch saves to a session's run
 *   names.c         that nothing is given twice
 *   lossy.c         lossy ones: statistics, steps and factors of a tile, then its blocks
 *   pipeline.c      blocks: analyse, decide, encode, write, several at once
 *   device.c        exact blocks that a device codes before they come there
 *   order.c         what of that has to be done in their order
 *   append.c        encoded blocks into the chunk file
 *   commit.c        seal (file durable) -> publish (manifest, the commit point) -> catalog
 *   workspace.c     scratch, from one save to the next
 *   free_space.c    on a full disk: what gives way to the save
 *   terms.c         the options that all ranks must give alike
 *   times.c         what took how long, of all ranks, for the catalog
 */
#ifndef ENGINE_SAVE_H
#define ENGINE_SAVE_H

#include <stdatomic.h>
#include <sys/types.h>

#include "base/float_mode.h"
#include "engine/encode/block_coder.h"
#include "engine/save/workspace.h"
#include "engine/save/measures.h"
#include "engine/save/pipeline.h"
#include "engine/save/self_check.h"
#include "engine/common/cancel.h"

typedef enum save_state { SAVE_OPEN, SAVE_FAILED, SAVE_SEALED } save_state;

/* How a save ends, as far as its files are concerned. */
typedef enum save_end {
    SAVE_DROPPED,   /* nothing names its chunk file */
    SAVE_COMMITTED, /* a manifest does */
    SAVE_UNDECIDED  /* a manifest may: recovery will see, by the intent that stays */
} save_end;

/* Where a save goes, decided under the publish lock. */
typedef struct save_target {
    char run[CKD_RUN_MAX + 1];
    uint64_t step;
    bool has_origin;       /* there is a checkpoint that this state came from */
    ckd_checkpoint origin; /* it: the delta's parent unless a base was asked for */
    bool compare;          /* the checkpoint exists already: only compare with it */
    ckd_checkpoint existing;
    ckd_id branch_origin, resumed_from;
    uint32_t lossy_resumes;
} save_target;
/* What can be said of them without the store. Errors: INVALID. */
ckd_status save_check_options(const ckd_save_options *options, ckd_error *err);
ckd_status save_resolve_target(save_target *out, ckd_store *store, const ckd_save_options *options,
                               ckd_error *err);

/* What of an existing checkpoint was found to be the same. */
typedef struct comparison {
    struct compared_tensor *tensors; /* in the order of the view's */
    bool *blobs;
} comparison;

/* Second moments, as far as others need them (moment_stats.c). */
typedef struct moment_stats moment_stats;

/* Sides of blocks, in elements (block_grid.c). */
typedef struct block_sides {
    uint64_t max, min;
    uint64_t target; /* as long they shall be on average at least: small blocks cost bytes and time */
} block_sides;
/* Which lossy matrices are cut, and how. */
typedef struct save_grid {
    block_sides down, across;   /* of rows, of columns */
    uint64_t elements, columns; /* of a matrix, or of each of a stack, at least */
} save_grid;

/* Names of what was given to a save: a hash table with open addressing (names.c). */
typedef struct saved_name saved_name;
typedef struct saved_names {
    saved_name **slots; /* the newest of each name; NULL: free */
    size_t count, capacity;
} saved_names;

/* When this rank worked on something, by clock_monotonic_ns, and how long all threads together did. begun_ns 0: not yet. */
typedef struct save_stage {
    uint64_t begun_ns, ended_ns, work_ns;
} save_stage;
/* Work of ns has just ended. */
void save_worked(save_stage *stage, uint64_t ns);

/* What a rank's part tells of its times. */
typedef struct save_rank {
    uint32_t rank;
    uint64_t began_ns; /* since 1970, by its clock */
    uint32_t stage_count;
    ckd_stage_times stages[PART_STAGES_MAX];
} save_rank;

struct ckd_save {
    ckd_store *store;
    ckd_save_options options; /* its strings are not kept, but for metric_name */
    char metric_name[32];
    bytes terms; /* terms.c */
    save_target target;
    save_state state;
    ckd_id checkpoint, writer_id, file_id;
    bool follows, has_newest; /* a session's: what was its run's newest when it began (launch_check.c) */
    ckd_checkpoint newest;

    file_lock *reader_lock; /* what the parents need is not unlinked */
    file_lock *intent_lock; /* tells that this writer lives */
    chunk_writer *writer;
    chunk_writer *materialized;      /* copies of long chains; NULL: none needed so far */
    bool materialized_closed;        /* they stand under their temporary name */
    atomic_bool materialized_failed; /* no copies: they are not worth failing a save for */
    uint64_t index_bytes;            /* about what the index of what was written will take */
    bool undecided;                  /* a manifest was named, and may not have been taken back */
    pid_t process;                   /* whose files these are: not a forked child's */
    file_ref sealed;                 /* once SAVE_SEALED */

    view_cache views;
    const view *parent;   /* of deltas; NULL: none */
    const view *existing; /* when comparing */
    coding_context coding;
    referenced_checkpoints referenced;
    load_budget budget;
    uint64_t staging; /* bytes to be held besides the caller's and the workers' */
    pathname scratch; /* the directory of what does not fit */
    content_index dedup_index;
    step_states steps;
    record_arena arena; /* tensors, shapes and regions that `dedup_index` points to */
    saved_names names;
    ckd_id *dependencies;
    size_t dependency_count, dependency_capacity;

    save_workspace *workspace;
    block_job *jobs;    /* the workspace's, one for each place in the pipeline */
    uint32_t job_count; /* threads */
    save_pipeline pipeline;
    bool has_masters;        /* exact ones */
    bytes whole_masters;     /* large ones in one piece (block_grid.c) */
    bool has_pending_values; /* on a device: of blocks under way, which may want them after all */
    uint64_t
        named_elements; /* of the tensor's, on a device, if masters are saved: known without their values */
    bool buffers_are_stable; /* what tensors point to stays as it is until the save has ended */
    double leaves_budget;    /* the next piece's share (region_job) */
    uint64_t raw_bytes;      /* saved so far */
    comparison compared;     /* with `existing` */
    save_measures measures;  /* of a lossy save */
    moment_stats *seconds;
    self_check_list self_checks;
    struct save_device *device; /* of exact tensors on devices; NULL: none yet */
    struct save_tiles *tiles;   /* of lossy tensors; NULL: none yet */
    save_grid grid;
    atomic_bool damaged; /* parts of the parent cannot be read; the saving thread tells, once */
    bool reported_damage;
    uint64_t in_doubt;    /* regions of tensors that look like an optimizer's, and were given no role */
    bool parents_on_host; /* a device failed to make what lossy tiles on it build on */
    uint64_t begun_ns;
    save_stage snapshot; /* of a session: its work is that the trainer stood still */
    save_stage analyse, encode, append, sync;
    uint64_t publish_ns; /* when all parts were there */
    save_rank *ranks;    /* as they told; world of them at most */
    uint32_t rank_count;
    float_mode callers_mode; /* while a call computes */

    /*
     * What the parent has of the region that ckd_save_tensor is about to be given, exactly so, in the caller's memory; NULL: not at hand. It is
     * compared with the store's hashes before it is used.
     */
    const void *before;
    /* Where what a decoder will give of that region goes, exactly so, as far as it is known; may be the same memory. NULL: nowhere. */
    void *kept;

    /* Of ranks that save together; else nothing. */
    cancel_check stop; /* another rank is dead */
    /* Under the publish lock, before the manifest: may rank 0 commit, or was it given up? */
    ckd_status (*claim)(void *context, const ckd_id *checkpoint, ckd_error *err);
    void *claim_context;
};

/* Releases everything, and removes what is to go. If some of that fails, the intent stays, for recovery. */
void save_free(ckd_save *save, save_end end);
/* Remembers that this save depends on another checkpoint. */
ckd_status save_depend(ckd_save *save, const ckd_id *checkpoint, ckd_error *err);
/* INVALID if a checkpoint of the store has this save's id. With the store's mutex. */
ckd_status save_check_id_unused(const ckd_save *save, ckd_error *err);
/* STATE unless open; every public call on a save begins with it. */
ckd_status save_check_open(const ckd_save *save, ckd_error *err);

/* The fidelity of a role, by the options or in this save. */
ckd_fidelity save_fidelity_of(const ckd_save_options *options, ckd_role role);
ckd_fidelity save_fidelity(const ckd_save *save, ckd_role role);
/* Is what is saved so, in a tensor of this role, coded against its parent? */
bool save_builds_on_parent(const ckd_save_options *options, ckd_role role, ckd_dtype dtype);
/* The coarsest of all roles': the checkpoint's. */
ckd_fidelity save_coarsest_fidelity(const ckd_save *save);

/* ---- tensor.c ---- */
/* `count` elements from `first` on, in the caller's memory, or in `room` through its read function. */
ckd_status save_fetch(const void **values, ckd_save *save, bytes *room, const ckd_tensor *t, uint64_t first,
                      uint64_t count, ckd_error *err);
ckd_status save_report_progress(ckd_save *save, uint64_t raw, ckd_error *err);
/* Writes all blocks that are under way. For an open save; a failure is its end. */
ckd_status save_finish_blocks(ckd_save *save, ckd_error *err);
/* Returns when all lossy tiles are written (lossy.c). */
ckd_status save_end_tiles(ckd_save *save, ckd_error *err);
/* Once, if parts of the parent cannot be read. By the saving thread. */
void save_report_damage(ckd_save *save);

/* ---- launch_check.c ---- */
/*
 * Of a session's saves, with the store's mutex and under the publish lock: EXISTS if the run's newest checkpoint is another launch's. When the save
 * begins, and before its manifest is published.
 */
ckd_status save_follow_begin(ckd_save *save, ckd_error *err);
ckd_status save_follow_publish(const ckd_save *save, ckd_error *err);

/* ---- names.c ---- */
/*
 * Before a region is coded. Tensor and region live as long as the save; the region is canonical. Errors: MISMATCH (it overlaps one that was given
 * before, or the tensor has another dtype, shape or role there), NOMEM.
 */
ckd_status save_record_region(ckd_save *save, const record_tensor *tensor, const geometry *shape,
                              const ckd_region *region, uint64_t elements, ckd_error *err);
/* The same of a blob. Errors: MISMATCH (its name was given before), NOMEM. */
ckd_status save_record_blob(ckd_save *save, const char *name, ckd_error *err);
void save_names_free(saved_names *n);

/* ---- order.c ---- */
/* A share of what a tensor was expected to cost, as the parent `v` has it, leaves the budget, as its own figures come. 0: nothing does. */
void save_stop_expecting(load_budget *budget, const view *v, const view_tensor *parent, double share);

/* ---- block_grid.c ---- */
/* As ckd_save_begin sets them. */
save_grid save_default_grid(void);
/* Of the exact blocks of a tensor that is not cut into panels, at most. */
uint64_t save_block_elements(const ckd_save *save, const ckd_tensor *tensor);
/* Is the region, of so many elements, saved in panels of columns? The second one: if it is lossy. */
bool save_is_cut(const ckd_save *save, const ckd_tensor *tensor, const tensor_context *t, uint64_t elements);
/* One that is not: if it is a large master, its rounded copies will not be, either. Errors: NOMEM. */
ckd_status save_record_whole(ckd_save *save, const tensor_context *t, uint64_t elements, ckd_error *err);
bool save_is_cut_lossy(const ckd_save *save, const tensor_context *t, uint64_t elements);
/* Where the blocks of a panel end. */
typedef struct save_places save_places;
typedef struct save_panel_rows {
    const view_shard *parent; /* where this one's do; or NULL, and: */
    const save_places *places;
    uint64_t first, width; /* its first row in the tensor, or in each matrix of a stack; its columns */
    uint64_t stacked;      /* rows of each matrix of the stack; 0: there is none */
    uint64_t max;          /* rows of a block, so that of the widest panel it is not too large */
} save_panel_rows;
/* Elements of the block that begins at element `first` of the panel, unless that ends before. */
uint64_t save_panel_block(const save_panel_rows *rows, uint64_t first);
/* Some columns of a region: a region of its own. */
typedef struct save_panel {
    tensor_context context; /* its region is the save's; rows: the next one */
    save_panel_rows rows;
    uint64_t first; /* column, in the whole region, which has so many: */
    uint64_t columns;
} save_panel;
typedef struct save_panels {
    save_panel *items;
    size_t count;
    save_places *places; /* of rows */
} save_panels;
/* All of a region, from the first column to the last. Release with save_panels_free, whatever the status. Errors: NOMEM. */
ckd_status save_cut(save_panels *out, ckd_save *save, const tensor_context *t, const block_sides *down,
                    const block_sides *across, ckd_error *err);
void save_panels_free(save_panels *p);
/* Elements first ... end - 1 of a panel, exactly; tensor: with the values of the whole region. */
ckd_status save_exact_panel(ckd_save *save, const ckd_tensor *tensor, const save_panel *panel, uint64_t first,
                            uint64_t end, ckd_error *err);
ckd_status save_in_panels(ckd_save *save, const ckd_tensor *tensor, const tensor_context *t, ckd_error *err);

/* ---- commit.c ---- */
/* ckd_save_publish without what comes behind it (store_hooks.after_commit): that must not keep other ranks waiting. */
ckd_status save_publish(ckd_checkpoint *info, ckd_save *save, const ckd_part *parts, size_t count,
                        ckd_error *err);

/* ---- terms.c ---- */
/* Appends the options that all ranks of a save must give alike. */
void save_terms_put(bytes *to, const ckd_save_options *options);
/*
 * INVALID, naming rank and option, unless another rank gave what the first one did. A rank without a metric leaves that to the first. Of any
 * bytes: what is no list of options is INVALID, too.
 */
ckd_status save_terms_compare(const ckd_bytes *first, uint32_t first_rank, const ckd_bytes *other,
                              uint32_t rank, ckd_error *err);

/* ---- times.c ---- */
/* What this rank has to tell, its part being about to be sent. */
void save_report_times(part *to, const ckd_save *save);
/* What another, or this one, told. Errors: NOMEM. */
ckd_status save_keep_times(ckd_save *save, const part *told, ckd_error *err);
/* In a transaction of the catalog. */
ckd_status save_add_times(const ckd_save *save, const ckd_checkpoint *saved, ckd_error *err);

/* ---- free_space.c ---- */
/* For so many bytes of payload into the chunk file, and of copies into the materialized copy? */
bool save_has_space(const ckd_save *save, uint64_t payload, uint64_t copies);
/* ... and the rest while nobody else is at work on the save. */
/* Before bytes of payload go into the chunk file, and of copies into the materialized copy: if need be, copies give way. */
void save_free_space(ckd_save *save, uint64_t payload, uint64_t copies);
/* Removes all materialized copies, this save's included. false: there were none. */
bool save_drop_copies(ckd_save *save);
/* A write failed with `status`: has there been room made for another try, in a new file? */
bool save_may_retry(ckd_save *save, ckd_status status);

/* ---- comparison.c: SAME_OK on a checkpoint that exists ---- */
ckd_status save_compare_begin(ckd_save *save, ckd_error *err);
/* EXISTS, naming the tensor, if the block's values differ from the existing checkpoint's. */
ckd_status save_compare_block(ckd_save *save, block_job *job, const tensor_context *tensor, ckd_error *err);
/* All blocks of the tensor's region were the same. */
void save_compared_region(ckd_save *save, const tensor_context *tensor);
ckd_status save_compare_blob(ckd_save *save, const char *name, const void *data, size_t size, ckd_error *err);
/* EXISTS unless everything that the existing checkpoint holds was compared, once. */
ckd_status save_compare_end(const ckd_save *save, ckd_error *err);
void save_compare_free(ckd_save *save);

#endif
