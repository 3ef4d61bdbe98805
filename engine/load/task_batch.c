/*
 * Executes tasks for host memory together: one list of their blocks, and one run of the pool. So even tensors of a
 * single block keep all threads busy.
 */
#include <stdlib.h>

#include "base/float_mode.h"
#include "engine/load/load.h"

#define ITEM_BYTES \
    (64u << 10) /* small blocks are handed to a thread together, up to so many bytes of values */

/* One block of the list. */
typedef struct listed_block {
    const view_block *block;
    load_task *task;
    uint64_t copied;
    size_t at, lead; /* its index in the list; that of the first block that is rebuilt with it */
    bool is_last;    /* the last block of its chain, rebuilt from the others */
} listed_block;

/* An item is a run of listed blocks that a thread takes at a time: from its `first` to that of the next item. */
typedef struct work_list {
    ckd_load *load;
    listed_block *blocks;
    size_t *items;
    size_t block_count, item_count;
} work_list;

static ckd_status decode_item(void *context, size_t index, uint32_t worker, ckd_error *err) {
    work_list *w = context;
    ckd_status status = CKD_OK;
    for (size_t i = w->items[index]; i < w->items[index + 1] && status == CKD_OK; i++) {
        listed_block *b = &w->blocks[i];
        const span_target target = {b->task->tensor, &b->task->span, b->task->to};
        status = load_decode_block(w->load, worker, b->block, &target, &b->copied, err);
        err_in_tensor(err, status, b->task->tensor->tensor->name);
    }
    return status;
}

/* ---- blocks that are rebuilt together ---- */

/* A block, ordered by the blocks that it is rebuilt with. */
typedef struct companion {
    size_t group, at;
} companion;

static int by_group(const void *a, const void *b) {
    const companion *x = a, *y = b;
    int order = (x->group > y->group) - (x->group < y->group);
    return order ? order : (x->at > y->at) - (x->at < y->at);
}

static int by_lead(const void *a, const void *b) {
    const listed_block *x = a, *y = b;
    int order = (x->lead > y->lead) - (x->lead < y->lead);
    order = order ? order : y->is_last - x->is_last;
    return order ? order : (x->at > y->at) - (x->at < y->at);
}

/*
 * Puts moments and the weights that are rebuilt with them next to each other. On different threads, both would decode
 * the same chain. Weights come first: their ancestors are decoded from the oldest on, and each is dropped soon.
 */
static ckd_status gather_companions(work_list *w, ckd_error *err) {
    const sibling_cache *shared = &w->load->shared;
    companion *all = shared->view ? calloc(w->block_count + 1, sizeof(*all)) : NULL;
    if (shared->view && !all) {
        return err_nomem(err, w->block_count * sizeof(*all), "a load's blocks");
    }
    for (size_t i = 0; i < w->block_count; i++) {
        w->blocks[i].lead = w->blocks[i].at = i;
        if (all) {
            const view_block *b = w->blocks[i].block;
            all[i] = (companion){sibling_cache_group(shared, b), i};
            w->blocks[i].is_last = all[i].group == (size_t)(b - shared->view->blocks);
        }
    }
    if (all) {
        qsort(all, w->block_count, sizeof(*all), by_group);
        for (size_t i = 1; i < w->block_count; i++) {
            if (all[i].group == all[i - 1].group) {
                w->blocks[all[i].at].lead = w->blocks[all[i - 1].at].lead;
            }
        }
        qsort(w->blocks, w->block_count, sizeof(*w->blocks), by_lead);
    }
    free(all);
    return CKD_OK;
}

/* ---- the list ---- */

static ckd_status list_blocks(work_list *w, load_task *tasks, size_t count, ckd_error *err) {
    size_t total = 0;
    for (size_t i = 0; i < count; i++) {
        total += tasks[i].count;
    }
    w->blocks = calloc(total + 1, sizeof(*w->blocks));
    w->items = calloc(total + 1, sizeof(*w->items));
    if (!w->blocks || !w->items) {
        return err_nomem(err, total * sizeof(*w->blocks), "a load's blocks");
    }
    for (size_t i = 0; i < count; i++) {
        for (size_t k = 0; k < tasks[i].count; k++) {
            w->blocks[w->block_count++] = (listed_block){.block = tasks[i].blocks[k], .task = &tasks[i]};
        }
    }
    return gather_companions(w, err);
}

static void cut_into_items(work_list *w) {
    uint64_t size = 0;
    for (size_t i = 0; i < w->block_count; i++) {
        const listed_block *b = &w->blocks[i];
        bool together = i > 0 && b->lead == b[-1].lead;
        if (i == 0 || (!together && size + b->block->record->raw_size > ITEM_BYTES)) {
            w->items[w->item_count++] = i;
            size = 0;
        }
        size += b->block->record->raw_size;
    }
    w->items[w->item_count] = w->block_count;
}

ckd_status load_tasks_execute(ckd_load *load, load_task *tasks, size_t count, ckd_error *err) {
    work_list w = {.load = load};
    ckd_status status = list_blocks(&w, tasks, count, err);
    if (status == CKD_OK) {
        cut_into_items(&w);
        float_mode mode = float_mode_enter();
        status = pool_run(load->store->pool, w.item_count, decode_item, &w, err);
        float_mode_leave(mode);
    }
    for (size_t i = 0; i < w.block_count && status == CKD_OK; i++) {
        w.blocks[i].task->copied += w.blocks[i].copied;
    }
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        tasks[i].done = tasks[i].count;
        status = load_task_check(&tasks[i], err);
        err_in_tensor(err, status, tasks[i].tensor->tensor->name);
    }
    free(w.blocks);
    free(w.items);
    return status;
}
