/* Lists the tensors of a checkpoint, with shards folded together. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "catalog/db.h"

/* One row of S_TENSORS. name and coding point into the statement. */
typedef struct shard_row {
    int64_t tensor;
    uint32_t shard, ordinal;
    const char *name, *coding;
    ckd_tensor_info info;
    double value_squares;
    uint64_t elements; /* of the shard */
} shard_row;

static ckd_status shard_read(shard_row *out, query *q, ckd_error *err) {
    *out = (shard_row){0};
    ckd_tensor_info *info = &out->info;
    out->tensor = column_key(q, 0);
    out->shard = column_u32(q, 1, 0, UINT32_MAX);
    out->ordinal = column_u32(q, 2, 0, UINT32_MAX);
    out->name = column_text(q, 3, 1, CKD_NAME_MAX);
    info->role = (ckd_role)column_u32(q, 4, CKD_ROLE_WEIGHT, CKD_ROLE_OTHER);
    info->dtype = (ckd_dtype)column_u32(q, 5, CKD_F64, CKD_BOOL);
    const char *shape = column_text(q, 6, 2, SHAPE_TEXT - 1);
    info->raw_bytes = column_u64(q, 7, INT64_MAX);
    info->stored_bytes = column_u64(q, 8, INT64_MAX);
    out->coding = column_text(q, 9, 1, CODING_MAX);
    info->depth = column_u32(q, 10, 0, UINT32_MAX);
    info->rel_l2 = column_real(q, 11);
    info->max_error = column_real(q, 12);
    out->value_squares = column_real(q, 13);
    info->direction_change = column_real(q, 14);
    info->nonfinite = column_u64(q, 15, INT64_MAX);
    out->elements = column_u64(q, 16, INT64_MAX);
    ckd_status status = query_row_status(q, err);
    if (status == CKD_OK && (!shape_parse(&info->ndim, info->shape, shape) ||
                             !shape_elements(&info->elements, info->ndim, info->shape))) {
        status = catalog_damaged(q->c, err, "a tensor has the shape \"%s\"", shape);
    }
    return status;
}

/* A tensor of the list being built, and its final position. */
typedef struct tensor_slot {
    ckd_tensor_info info;
    uint32_t ordinal;
    double value_squares; /* sum over the shards so far */
    uint64_t elements;
} tensor_slot;

typedef struct tensor_slots {
    tensor_slot *items;
    size_t count, capacity;
} tensor_slots;

/* Allocates name and coding in one block, which starts at `name`. */
static ckd_status tensor_new(tensor_slots *slots, const shard_row *row, ckd_error *err) {
    if (ARRAY_GROW(slots->items, slots->capacity, slots->count + 1, "a list from the catalog", err) !=
        CKD_OK) {
        return CKD_E_NOMEM;
    }
    size_t name = strlen(row->name) + 1, coding = strlen(row->coding) + 1;
    char *text = malloc(name + coding);
    if (!text) {
        return err_nomem(err, name + coding, "a name");
    }
    memcpy(text, row->name, name);
    memcpy(text + name, row->coding, coding);
    tensor_slot *slot = &slots->items[slots->count++];
    *slot = (tensor_slot){.info = row->info,
                          .ordinal = row->ordinal,
                          .value_squares = row->value_squares,
                          .elements = row->elements};
    slot->info.name = text;
    slot->info.coding = text + name;
    slot->info.shards = 1;
    return CKD_OK;
}

/* Maximum of two numbers; NaN (unknown) if either is unknown. */
static double larger(double a, double b) {
    if (isnan(a) || isnan(b)) {
        return NAN;
    }
    return a > b ? a : b;
}

/* Combines the norms of two parts by their weights; without weights, takes the larger. */
static double joined(double a, double weight_a, double b, double weight_b) {
    double mean = (weight_a * a * a + weight_b * b * b) / (weight_a + weight_b);
    return weight_a + weight_b > 0 && isfinite(mean) ? sqrt(mean) : larger(a, b);
}

/* Returns false if the shard contradicts earlier shards. */
static bool tensor_fold(tensor_slot *slot, const shard_row *row) {
    ckd_tensor_info *a = &slot->info;
    const ckd_tensor_info *b = &row->info;
    if (slot->ordinal != row->ordinal || a->role != b->role || a->dtype != b->dtype || a->ndim != b->ndim ||
        memcmp(a->shape, b->shape, sizeof(a->shape)) != 0 || a->shards == UINT32_MAX ||
        !size_add(&a->raw_bytes, a->raw_bytes, b->raw_bytes) ||
        !size_add(&a->stored_bytes, a->stored_bytes, b->stored_bytes) ||
        !size_add(&a->nonfinite, a->nonfinite, b->nonfinite) ||
        !size_add(&slot->elements, slot->elements, row->elements)) {
        return false;
    }
    a->shards++;
    a->depth = a->depth > b->depth ? a->depth : b->depth;
    a->rel_l2 = joined(a->rel_l2, slot->value_squares, b->rel_l2, row->value_squares);
    slot->value_squares += row->value_squares;
    a->direction_change = joined(a->direction_change, (double)(slot->elements - row->elements),
                                 b->direction_change, (double)row->elements);
    a->max_error = larger(a->max_error, b->max_error);
    if (strcmp(a->coding, row->coding) != 0) {
        a->coding = "mixed";
    }
    return true;
}

static ckd_status tensor_rows(tensor_slots *slots, query *q, ckd_error *err) {
    shard_row now;
    int64_t tensor = 0;
    uint32_t shard = 0;
    bool row;
    ckd_status status;
    while ((status = query_next(&row, q, err)) == CKD_OK && row) {
        status = shard_read(&now, q, err);
        if (status != CKD_OK) {
            return status;
        }
        bool first = slots->count == 0 || now.tensor != tensor;
        if (slots->count && (now.tensor < tensor || (!first && now.shard <= shard))) {
            return catalog_damaged(q->c, err, "shards are out of order");
        }
        if (!first && !tensor_fold(&slots->items[slots->count - 1], &now)) {
            return catalog_damaged(q->c, err, "shards of %s contradict each other", now.name);
        }
        if (first && (status = tensor_new(slots, &now, err)) != CKD_OK) {
            return status;
        }
        tensor = now.tensor;
        shard = now.shard;
    }
    return status;
}

static int by_ordinal(const void *a, const void *b) {
    const tensor_slot *x = a, *y = b;
    int order = (x->ordinal > y->ordinal) - (x->ordinal < y->ordinal);
    return order ? order : strcmp(x->info.name, y->info.name);
}

/* Moves the tensors into a list, in order. */
static ckd_status slots_to_list(ckd_tensor_list *out, tensor_slots *slots, ckd_error *err) {
    if (slots->count == 0) {
        return CKD_OK;
    }
    qsort(slots->items, slots->count, sizeof(*slots->items), by_ordinal);
    out->items = calloc(slots->count, sizeof(*out->items));
    if (!out->items) {
        return err_nomem(err, slots->count * sizeof(*out->items), "a list from the catalog");
    }
    for (size_t i = 0; i < slots->count; i++) {
        out->items[i] = slots->items[i].info;
    }
    out->count = slots->count;
    slots->count = 0;
    return CKD_OK;
}

static void slots_free(tensor_slots *slots) {
    for (size_t i = 0; i < slots->count; i++) {
        free((void *)slots->items[i].info.name);
    }
    free(slots->items);
}

static ckd_status tensors_of(ckd_tensor_list *out, catalog *c, int64_t checkpoint, ckd_error *err) {
    query q;
    tensor_slots slots = {0};
    ckd_status status = query_begin(&q, c, S_TENSORS, err);
    if (status == CKD_OK) {
        bind_key(&q, 1, checkpoint);
        status = tensor_rows(&slots, &q, err);
    }
    query_end(&q);
    THEN(status, slots_to_list(out, &slots, err));
    slots_free(&slots);
    return status;
}

/* Finds a checkpoint's row, and whether it has shards. */
static ckd_status find_detailed(int64_t *key, bool *detailed, catalog *c, const ckd_id *id, ckd_error *err) {
    query q;
    bool row = false;
    ckd_status status = query_begin(&q, c, S_DETAILED, err);
    if (status == CKD_OK) {
        bind_blob16(&q, 1, id->bytes);
        status = query_next(&row, &q, err);
    }
    if (status == CKD_OK && !row) {
        status = err_set(err, CKD_E_NOT_FOUND, "no such checkpoint");
    }
    if (status == CKD_OK) {
        *key = column_key(&q, 0);
        *detailed = column_u32(&q, 1, 0, 1) == 1;
        status = query_row_status(&q, err);
    }
    query_end(&q);
    return status;
}

ckd_status catalog_tensors(ckd_tensor_list *out, bool *detailed, catalog *c, const ckd_id *id,
                           ckd_error *err) {
    bool opened;
    int64_t key = 0;
    *out = (ckd_tensor_list){0};
    *detailed = false;
    ckd_status status = snapshot_begin(c, &opened, err);
    if (status != CKD_OK) {
        return status;
    }
    status = find_detailed(&key, detailed, c, id, err);
    if (status == CKD_OK && *detailed) {
        status = tensors_of(out, c, key, err);
    }
    snapshot_end(c, opened);
    return status;
}

typedef struct not_indexed_rows {
    size_t *places;
    size_t count, capacity, at; /* at: index in the list */
    const ckd_checkpoint_list *list;
} not_indexed_rows;

static ckd_status add_not_indexed(void *context, query *q, ckd_error *err) {
    not_indexed_rows *u = context;
    ckd_id id;
    column_id(&id, q, 0, false);
    ckd_status status = query_row_status(q, err);
    if (status != CKD_OK) {
        return status;
    }
    while (u->at < u->list->count && memcmp(&u->list->items[u->at].id, &id, sizeof(id)) != 0) {
        u->at++; /* it has its tensors */
    }
    if (u->at == u->list->count) {
        return catalog_damaged(q->c, err, "checkpoints without tensors are out of order");
    }
    if (ARRAY_GROW(u->places, u->capacity, u->count + 1, "a list from the catalog", err) != CKD_OK) {
        return CKD_E_NOMEM;
    }
    u->places[u->count++] = u->at++;
    return CKD_OK;
}

ckd_status catalog_not_indexed(size_t **places, size_t *count, const ckd_checkpoint_list *list, catalog *c,
                               ckd_error *err) {
    not_indexed_rows u = {.list = list};
    ckd_status status = snapshot_rows(c, S_NOT_INDEXED, NULL, add_not_indexed, &u, err);
    if (status != CKD_OK) {
        free(u.places);
        u = (not_indexed_rows){0};
    }
    *places = u.places;
    *count = u.count;
    return status;
}

/* Makes the row that this shard would have. */
static void row_of(shard_row *out, const catalog_shard *s) {
    *out = (shard_row){.shard = s->index,
                       .ordinal = s->ordinal,
                       .name = s->tensor,
                       .coding = s->coding,
                       .value_squares = s->value_squares,
                       .elements = s->elements,
                       .info = {.role = s->role,
                                .dtype = s->dtype,
                                .ndim = s->ndim,
                                .raw_bytes = s->raw_bytes,
                                .stored_bytes = s->stored_bytes,
                                .depth = s->depth,
                                .rel_l2 = s->rel_l2,
                                .max_error = s->max_error,
                                .direction_change = s->direction_change,
                                .nonfinite = s->nonfinite}};
    if (s->ndim) {
        memcpy(out->info.shape, s->shape, s->ndim * sizeof(*s->shape));
    }
    (void)shape_elements(&out->info.elements, s->ndim, s->shape); /* already validated */
}

static ckd_status fold_sorted(tensor_slots *slots, const entry_plan *p, size_t count, ckd_error *err) {
    ckd_status status = CKD_OK;
    for (size_t i = 0; i < count && status == CKD_OK; i++) {
        shard_row row;
        row_of(&row, p->shards[i]);
        if (i == 0 || strcmp(p->shards[i - 1]->tensor, row.name) != 0) {
            status = tensor_new(slots, &row, err);
        } else if (!tensor_fold(&slots->items[slots->count - 1], &row)) {
            status = err_set(err, CKD_E_INVALID, "shards of a tensor contradict each other");
            err_in_tensor(err, status, row.name);
        }
    }
    return status;
}

ckd_status catalog_entry_tensors(ckd_tensor_list *out, const catalog_entry *entry, ckd_error *err) {
    entry_plan p;
    tensor_slots slots = {0};
    *out = (ckd_tensor_list){0};
    ckd_status status = entry_plan_init(&p, entry, err);
    THEN(status, fold_sorted(&slots, &p, entry->shard_count, err));
    THEN(status, slots_to_list(out, &slots, err));
    slots_free(&slots);
    entry_plan_free(&p);
    return status;
}

void catalog_tensors_free(ckd_tensor_list *list) {
    if (list) {
        for (size_t i = 0; i < list->count; i++) {
            free((void *)list->items[i].name);
        }
        free(list->items);
        *list = (ckd_tensor_list){0};
    }
}
