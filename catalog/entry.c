/* Validates an entry before the first row is written. */
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "catalog/db.h"

bool text_storable(const char *text, size_t min, size_t max) {
    size_t size = text ? strnlen(text, max + 1) : 0;
    return text && size >= min && size <= max && utf8_valid(text, size);
}

bool number_storable(uint64_t value) {
    return value <= INT64_MAX;
}

static ckd_status checkpoint_validate(const ckd_checkpoint *p, ckd_error *err) {
    static const ckd_id zero;
    bool parent = memcmp(&p->parent, &zero, sizeof(zero)) != 0;
    if (!run_name_valid(p->run)) {
        return err_set(err, CKD_E_INVALID, "\"%.*s\" is no name for a run", CKD_RUN_MAX, p->run);
    }
    if (!number_storable(p->step)) {
        return err_set(err, CKD_E_INVALID, "step %llu of run %s is too large: steps end at 2^63 - 1",
                       (unsigned long long)p->step, p->run);
    }
    const char *problem = NULL;
    if (memcmp(&p->id, &zero, sizeof(zero)) == 0) {
        problem = "no id";
    } else if (p->kind < CKD_BASE || p->kind > CKD_LOSSY_BASE) {
        problem = "an unknown kind";
    } else if (p->fidelity < CKD_EXACT || p->fidelity > CKD_COARSE) {
        problem = "an unknown fidelity";
    } else if ((p->kind == CKD_BASE && parent) || (p->kind == CKD_DELTA && !parent)) {
        problem = parent ? "a parent, although it is a base" : "no parent, although it is a delta";
    } else if (!text_storable(p->metric_name, 0, sizeof(p->metric_name) - 1)) {
        problem = "a metric whose name is not UTF-8 or too long";
    } else if (!number_storable(p->tensors) || !number_storable(p->raw_bytes) ||
               !number_storable(p->stored_bytes) || !number_storable(p->created_ns)) {
        problem = "a size beyond 2^63";
    }
    return problem ? err_set(err, CKD_E_INVALID, "checkpoint %s@%llu has %s", p->run,
                             (unsigned long long)p->step, problem)
                   : CKD_OK;
}

static ckd_status file_validate(const catalog_file *f, ckd_error *err) {
    if (!text_storable(f->name, 1, sizeof(f->name) - 1) || strchr(f->name, '/') || f->name[0] == '.') {
        return err_set(err, CKD_E_INVALID, "\"%.*s\" is no name for a chunk file", (int)sizeof(f->name) - 1,
                       f->name);
    }
    if (!number_storable(f->size)) {
        return err_set(err, CKD_E_INVALID, "chunk file %s has a size beyond 2^63", f->name);
    }
    return CKD_OK;
}

static ckd_status shard_validate(const catalog_shard *s, ckd_error *err) {
    uint64_t elements;
    char text[REGION_TEXT];
    const char *problem = NULL;
    if (!text_storable(s->tensor, 1, CKD_NAME_MAX)) {
        return err_set(err, CKD_E_INVALID, "a tensor has a name that is not 1 to %d bytes of UTF-8",
                       CKD_NAME_MAX);
    }
    if (s->role < CKD_ROLE_WEIGHT || s->role > CKD_ROLE_OTHER) {
        problem = "an unknown role";
    } else if (s->dtype < CKD_F64 || s->dtype > CKD_BOOL) {
        problem = "an unknown dtype";
    } else if ((s->ndim && !s->shape) || !shape_elements(&elements, s->ndim, s->shape)) {
        problem = "a shape with too many dimensions or elements";
    } else if (!s->region || !region_format(text, s->ndim, s->region)) {
        problem = "an invalid region";
    } else if (!text_storable(s->coding, 1, CODING_MAX)) {
        problem = "a coding without a name";
    } else if (s->elements > elements) {
        problem = "more elements than its tensor";
    } else if (!number_storable(s->raw_bytes) || !number_storable(s->stored_bytes) ||
               !number_storable(s->nonfinite)) {
        problem = "a size beyond 2^63";
    }
    if (!problem) {
        return CKD_OK;
    }
    err_set(err, CKD_E_INVALID, "shard %u has %s", s->index, problem);
    return err_in_tensor(err, CKD_E_INVALID, s->tensor);
}

static bool shards_agree(const catalog_shard *a, const catalog_shard *b) {
    return a->ordinal == b->ordinal && a->role == b->role && a->dtype == b->dtype && a->ndim == b->ndim &&
           (a->ndim == 0 || memcmp(a->shape, b->shape, a->ndim * sizeof(*a->shape)) == 0);
}

static int by_tensor_and_index(const void *a, const void *b) {
    const catalog_shard *x = *(const catalog_shard *const *)a, *y = *(const catalog_shard *const *)b;
    int order = strcmp(x->tensor, y->tensor);
    return order ? order : (x->index > y->index) - (x->index < y->index);
}

static ckd_status plan_add(entry_plan *p, const catalog_shard *s, const catalog_shard *before,
                           ckd_error *err) {
    if (before && strcmp(before->tensor, s->tensor) == 0) {
        if (before->index == s->index || !shards_agree(before, s)) {
            err_set(err, CKD_E_INVALID, "shard %u %s", s->index,
                    before->index == s->index ? "was given twice"
                                              : "disagrees with another shard of its tensor");
            return err_in_tensor(err, CKD_E_INVALID, s->tensor);
        }
    }
    p->present[s->role] = true;
    if (!size_add(&p->raw[s->role], p->raw[s->role], s->raw_bytes) || !number_storable(p->raw[s->role]) ||
        !size_add(&p->stored[s->role], p->stored[s->role], s->stored_bytes) ||
        !number_storable(p->stored[s->role]) ||
        !size_add(&p->elements[s->role], p->elements[s->role], s->elements) ||
        !number_storable(p->elements[s->role])) {
        err_set(err, CKD_E_INVALID, "the sizes of the shards add up to more than 2^63");
        return err_in_tensor(err, CKD_E_INVALID, s->tensor);
    }
    return CKD_OK;
}

ckd_status entry_plan_init(entry_plan *p, const catalog_entry *entry, ckd_error *err) {
    uint64_t size;
    *p = (entry_plan){0};
    ckd_status status = checkpoint_validate(entry->checkpoint, err);
    if (status == CKD_OK && !number_storable(entry->manifest_bytes)) {
        status = err_set(err, CKD_E_INVALID, "a manifest has a size beyond 2^63");
    }
    if (status == CKD_OK && entry->not_indexed && entry->shard_count) {
        status = err_set(err, CKD_E_INVALID, "shards of a checkpoint whose shards are not known");
    }
    for (size_t i = 0; status == CKD_OK && i < entry->file_count; i++) {
        status = file_validate(&entry->files[i], err);
    }
    for (size_t i = 0; status == CKD_OK && i < entry->shard_count; i++) {
        status = shard_validate(&entry->shards[i], err);
    }
    if (status != CKD_OK || entry->shard_count == 0) {
        return status;
    }
    if (!size_mul(&size, entry->shard_count, sizeof(*p->shards)) || size > SIZE_MAX ||
        !(p->shards = malloc(size))) {
        return err_nomem(err, entry->shard_count, "pointers to shards");
    }
    for (size_t i = 0; i < entry->shard_count; i++) {
        p->shards[i] = &entry->shards[i];
    }
    qsort(p->shards, entry->shard_count, sizeof(*p->shards), by_tensor_and_index);
    for (size_t i = 0; status == CKD_OK && i < entry->shard_count; i++) {
        status = plan_add(p, p->shards[i], i ? p->shards[i - 1] : NULL, err);
    }
    return status;
}

void entry_plan_free(entry_plan *p) {
    free(p->shards);
    *p = (entry_plan){0};
}
