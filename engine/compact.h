/*
 * Compaction: rewriting checkpoints so that they build on others, or are stored otherwise, and load to the same bits. Internal to engine/.
 *
 *   compact.c          the call: what is wanted, in which order, what goes afterwards
 *   compact_order.c    in which order, for those that build on each other
 *   compact_examine.c  one checkpoint: what becomes of each of its blocks
 *   compact_code.c     one block, coded anew
 *   compact_lattice.c  the same of values on a lattice
 *   compact_links.c    one block, with the deltas below it
 *   compact_files.c    its new files
 *   compact_written.c  which shared records these have
 *   compact_intent.c   what a rewrite writes and needs
 *   compact_publish.c  next generation, catalog
 *   compact_pack.c     which small files become one
 *   compact_old.c      generations that were replaced
 *
 * Invariants:
 *  1. A checkpoint is rewritten after all that it builds on, and builds only on what it came from: nothing can come to depend on itself.
 *  2. What is published was read back from its file, decoded, and has the content hashes that it had.
 *  3. Payloads that are copied were compared with their checksums: damage is never made to look right.
 */
#ifndef ENGINE_COMPACT_H
#define ENGINE_COMPACT_H

#include "engine/block_coder.h"
#include "base/float_mode.h"
#include "engine/needs.h"

/* What loading a block takes, deltas below it included. */
typedef struct block_load {
    uint32_t depth;
    load_cost chain;
} block_load;

/* Of a checkpoint that was rewritten, or would be: by number of the block in its views, which are the same in all generations. */
typedef struct load_table {
    ckd_id checkpoint;
    size_t count;
    block_load *blocks;
} load_table;

/* Scratch of one worker. */
typedef struct compact_worker {
    block_job job;
    bytes values, before, now_floats, before_floats, q, at, bits, alone, delta, check;
    lattice_work lattice;
} compact_worker;

/* A link that a checkpoint has, or would have, by now: those that came from it may build on it. */
typedef struct known_link {
    hash128 content;
    ckd_id owner;
    uint64_t count;
    uint32_t dtype;
    block_load load;
} known_link;

typedef struct compaction {
    ckd_store *store;
    ckd_compact_options options;
    view_cache views; /* of what is being looked at, and what it builds on */
    columns_cache columns;
    content_index nothing; /* blocks are not looked for in their own checkpoint */
    compact_worker *workers;
    uint32_t worker_count;
    ckd_id *unwanted; /* nothing that stays may build on them; by id */
    size_t unwanted_count;
    load_table *tables; /* by id */
    size_t table_count, table_capacity;
    needs *all;        /* what there was at the beginning */
    known_link *links; /* that are in checkpoints that stay, by content: open addressing, owner zero: free */
    size_t link_count, link_capacity;
    uint64_t begun_ns, moved;  /* bytes read and written, for the limit */
    uint64_t done, to_be_done; /* stored bytes, for the callback */
    float_mode callers_mode;
} compaction;

/* ---- compact.c ---- */
bool compact_is_unwanted(const compaction *c, const ckd_id *checkpoint);
const load_table *compact_table(const compaction *c, const ckd_id *checkpoint);
/* Takes over `blocks`, also on failure. */
ckd_status compact_note(compaction *c, const ckd_id *checkpoint, block_load *blocks, size_t count,
                        ckd_error *err);
/* So many bytes were read or written: waits if that was too fast, tells the caller. CANCELLED. */
ckd_status compact_pace(compaction *c, uint64_t size, uint64_t done, ckd_error *err);
/* Views that were opened before something was published may be old. */
void compact_forget_views(compaction *c);

/* ---- compact_order.c ---- */
/*
 * Sorts `count` of n, dependents first, as needs_order left them: those that a checkpoint came from are done before it, too, so that it can build on what they took
 * over. Uses dependents_left, with which needs_order is done. Errors: NOMEM.
 */
ckd_status compact_order(need **order, size_t count, needs *n, ckd_error *err);

/* ---- compact_examine.c ---- */
typedef enum fate_state { FATE_UNKNOWN, FATE_ASKED, FATE_KNOWN } fate_state;

/* What becomes of a block. */
typedef struct block_fate {
    fate_state state;
    unsigned why;     /* it is coded anew; 0: it is copied */
    block_load load;  /* afterwards; of what is coded anew about, until it is */
    const view *onto; /* it may be coded as a delta on that; NULL: on its own */
    const view_tensor *onto_tensor;
    block_load onto_load;
    uint64_t linked; /* bytes that it takes with the deltas below it; 0: these cannot be taken over */
} block_fate;

typedef struct rewrite_plan {
    const view *view;
    ckd_id *lineage; /* checkpoints that it came from, and that stay; by id */
    size_t lineage_count;
    block_fate *fates; /* by block of the view */
    unsigned why;      /* 0: nothing is to be done */
    size_t recoded;
    uint32_t depth; /* afterwards */
    uint64_t about; /* stored bytes afterwards, estimated */
} rewrite_plan;
/* Errors: those of opening what the checkpoint builds on, CORRUPT (blocks that build on each other in a circle), NOMEM. */
ckd_status compact_examine(rewrite_plan *out, compaction *c, const ckd_id *checkpoint, bool cold,
                           ckd_error *err);
void rewrite_plan_free(rewrite_plan *p);
/* Of block i, which is copied, from what those that it builds on are known to take now. */
ckd_status compact_load_of(block_load *out, compaction *c, const rewrite_plan *p, size_t i, ckd_error *err);

/* Adds what loading the values takes now, wherever they stand but in what is being rewritten. */
ckd_status compact_source_load(block_load *to, compaction *c, const values_source *s);
/* Nanoseconds to decode it alone, as engine/cost.h counts them. What a lossy one takes depends on its factors: about what each of its chain takes. */
double compact_own_work(const record *r);
/* Does the block, or a link below it, build on what goes? */
bool compact_builds_on_unwanted(const compaction *c, const view *v, const record *r);

/* ---- compact_links.c ---- */
#define COMPACT_LINKS        64u
#define COMPACT_SIDES        2u                  /* of a block: its rows, its columns */
#define COMPACT_DEPENDENCIES (1 + COMPACT_SIDES) /* of a link */

typedef struct compact_link {
    const view *view; /* where it stands now */
    const view_block *from;
    const view_block *sides[COMPACT_SIDES]; /* what it shares with other blocks */
    uint32_t side_count;
} compact_link;
/* A block that is rewritten, the first, and the deltas below it that it takes over, down to something that stays. */
typedef struct compact_links {
    bool possible;
    compact_link items[COMPACT_LINKS];
    size_t count;
    bool ends_on_values; /* the last one is a delta on that: */
    dependency end;
    uint64_t bytes; /* of all of it, about */
    block_load load;
} compact_links;
void compact_find_links(compact_links *out, compaction *c, const rewrite_plan *plan, size_t block);
/* Others may build on the links that the checkpoint has now. Errors: NOMEM. */
ckd_status compact_know_link(compaction *c, const known_link *link, ckd_error *err);
/* Those that a plan comes to. */
ckd_status compact_know_planned(compaction *c, const rewrite_plan *plan, ckd_error *err);
/* Within the bounds on chains? r: the block's. */
bool compact_links_fit(const compact_links *l, const compaction *c, const record *r);

/* ---- compact_code.c ---- */
/* A record on its way into a new file. */
typedef struct compact_item {
    const record *from;
    const chunk *chunk;
    size_t block;  /* of the view; SIZE_MAX: no block */
    bool is_coded; /* anew: dependencies and payload are its own */
    record to;
    compact_links *links;       /* is_coded, but all payloads are old ones; owned; NULL: none */
    dependency dependencies[4]; /* of what was coded anew */
    bytes payload;
} compact_item;
ckd_status compact_worker_init(compact_worker *w, columns_cache *columns, ckd_error *err);
void compact_worker_free(compact_worker *w);
/*
 * Fills item->to and payload with the block as its plan wants it, and sets is_coded; leaves that false if what the block has cannot be bettered. Its values
 * are compared with their hash.
 */
ckd_status compact_code(compact_item *item, compaction *c, const rewrite_plan *p, compact_worker *w,
                        ckd_error *err);
/* Is a delta of `delta` bytes worth its load? */
bool compact_pays(const compaction *c, const load_cost *chain, const load_cost *base, uint64_t delta,
                  uint64_t alone);

/* ---- compact_lattice.c ---- */
/* A block's values as integers: on its own, and as differences to others. Buffers are the worker's. */
typedef struct lattice_try {
    ckd_dtype dtype;
    uint64_t count;
    symbols_grid grid;
    bool small;                          /* takes its time */
    const void *values;                  /* in their dtype */
    const void *before;                  /* NULL: nothing to differ from */
    bool alone_possible, delta_possible; /* payloads in w->alone and w->delta, which give these values */
} lattice_try;
ckd_status compact_lattice(lattice_try *t, compact_worker *w, ckd_error *err);

/* ---- compact_written.c: what the new files have, so that it is written once ---- */
typedef struct written_record {
    hash128 content;
    uint64_t count; /* of links: others are found by their content alone */
    uint32_t kind;  /* 0: the slot is free */
    uint32_t dtype;
} written_record;
typedef struct compact_written {
    written_record *slots; /* open addressing */
    size_t count, capacity;
} compact_written;
/* Would a reader that looks for the link, group or side record find one of these? */
bool compact_written_has(const compact_written *w, const record *r);
/* Errors: NOMEM. */
ckd_status compact_written_add(compact_written *w, const record *r, ckd_error *err);
void compact_written_free(compact_written *w);

/* ---- compact_intent.c ---- */
typedef struct compact_intent {
    ckd_id writer;
    note_file *files; /* the new ones */
    size_t file_count;
    file_lock *lock;
    bool undecided; /* a manifest was named, and may not have been taken back: recovery will see */
} compact_intent;

/* ---- compact_files.c ---- */
typedef struct rewrite {
    compaction *c;
    rewrite_plan *plan;
    compact_intent *intent;
    manifest m;                 /* of the next generation */
    bytes encoded;              /* m, as it is published */
    bool *coded;                /* by block of the plan's view: it is not a mere copy */
    compact_written written;    /* links and side records */
    bytes room;                 /* scratch */
    bytes links;                /* known_link: those that are written */
    size_t dependency_capacity; /* of m.dependencies */
    bool failed;                /* its records could not be written, or read */
} rewrite;
/* Names for the new files, as many as `like` has; freed by compact_intent_end. */
ckd_status compact_intent_name(compact_intent *i, const manifest *like, ckd_error *err);
/*
 * Makes the intent of these rewrites durable: none of the checkpoints, nor what they build on or may build on, can be deleted then. NOT_FOUND and
 * EXISTS: one was deleted or rewritten meanwhile; BUSY, IO, NOSPACE, NOMEM.
 */
ckd_status compact_intent_begin(compact_intent *i, const rewrite *members, size_t count, ckd_error *err);
/* What was written for nothing goes, then the intent; if some may be left, the intent stays, for recovery. */
void compact_intent_end(compact_intent *i, const ckd_store *store, bool committed);
/* Under the publish lock, the catalog in step: is the checkpoint the generation that was looked at? Are these all there? */
ckd_status compact_check_unchanged(const rewrite *r, ckd_error *err);
ckd_status compact_check_there(const ckd_store *store, const ckd_id *ids, size_t count, ckd_error *err);

/*
 * Writes the new files, whose ids are those of the intent, each with what all of these checkpoints have in their files of that number, and names them, durable. Sets sizes, roots and
 * dependencies of their manifests.
 */
ckd_status compact_write_files(rewrite *members, size_t count, ckd_error *err);
/* Appends the links to the file; *out is the block's record as it belongs above them. Errors: as chunk_read_payload and chunk_writer_append. */
ckd_status compact_write_links(record *out, dependency dependencies[COMPACT_DEPENDENCIES], rewrite *r,
                               chunk_writer *w, const compact_links *l, const record *block, ckd_error *err);
/* Reads the new files back: all payloads, and the values of what was coded anew. *last: the view of one in the same files, or NULL; becomes this one's, which the caller closes. */
ckd_status compact_verify(rewrite *r, view **last, ckd_error *err);

/* ---- compact_publish.c ---- */
/* What became of a checkpoint. */
typedef struct compact_done {
    uint64_t stored; /* bytes of it afterwards */
    bool failed;     /* it is what made the call fail; the others might do without it */
    ckd_error
        left; /* status NOT_FOUND or EXISTS: others were quicker, and it was left to them; else CKD_OK */
} compact_done;
/*
 * Rewrites the checkpoints of the plans, as many, into the same new files: `out`, one each. NOT_FOUND and EXISTS: one was deleted or rewritten before
 * this began; CORRUPT and UNSUPPORTED: one cannot be read; IO, NOSPACE, NOMEM, CANCELLED. One that is only cold and got no smaller stays as it is, and its plan says that nothing is to be done. Whatever happens, one generation of each is complete.
 */
ckd_status compact_rewrite(compact_done *out, compaction *c, rewrite_plan *plans, size_t count,
                           ckd_error *err);

/* ---- compact_pack.c ---- */
#define COMPACT_PACK_MOST 64u /* checkpoints: who opens one reads the index of all */
/* Checkpoints that are to stand in the same files. */
typedef struct compact_pack {
    const need *const *items;
    size_t count;
    uint64_t bytes; /* stored */
} compact_pack;
typedef struct compact_packs {
    compact_pack *items;
    size_t count;
    uint64_t bytes;
    const need **members;
} compact_packs;
/*
 * order: `count` newest generations that are listed, wanted, and not rewritten otherwise; all: what else uses files. Release with
 * compact_packs_free, also after failures. Errors: NOMEM.
 */
ckd_status compact_find_packs(compact_packs *out, compaction *c, const needs *all, const need *const *order,
                              size_t count, ckd_error *err);
void compact_packs_free(compact_packs *packs);

/* ---- compact_old.c ---- */
/* Removes generations that newer ones have replaced, if nobody reads. *left: files that stay. Waits so long for readers to end. */
ckd_status compact_remove_old(uint64_t *left, ckd_store *store, uint32_t patience_ms, ckd_error *err);

#endif
