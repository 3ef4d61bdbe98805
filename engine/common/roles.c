/*
 * Finds the role of each tensor, and the weight that each optimizer tensor belongs to, from all names of a checkpoint
 * together. Names are compared as they are, then without module wrappers, then without prefixes of a whole model. An
 * ambiguous comparison finds nothing.
 */
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/hash.h"
#include "codec/lattice/lattice.h"
#include "engine/common/common.h"

enum { AS_IT_IS, UNWRAPPED, WITHOUT_MODEL, WAYS };

#define NOBODY    SIZE_MAX
#define ALIKE_MAX 64u /* most names examined that are equal apart from wrappers */

typedef struct name_key {
    uint64_t hash;
    size_t tensor;
} name_key;

/* Names to be found with one way of comparing. */
typedef struct name_table {
    name_key *keys; /* by hash, then tensor */
    size_t count;
} name_table;

typedef struct roles {
    ckd_tensor_role *out;
    const ckd_tensor_name *tensors;
    size_t count;
    const ckd_parameter_order *orders;
    size_t order_count;
    name_table weights[WAYS], masters[WAYS];
    size_t *owners; /* for each tensor, the weight or master that it belongs to */
} roles;

typedef struct text {
    char bytes[CKD_NAME_MAX + 1];
    size_t size;
} text;

/* ---- names in one way of comparing ---- */

static bool is_one_of(const char *at, size_t size, const char *const *names, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (strlen(names[i]) == size && memcmp(at, names[i], size) == 0) {
            return true;
        }
    }
    return false;
}

static void as_compared(text *out, const char *name, size_t size, int way) {
    static const char *const wrappers[] = {"module", "_orig_mod", "_fsdp_wrapped_module",
                                           "_checkpoint_wrapped_module", "_forward_module"};
    static const char *const models[] = {"model", "state_dict", "params", "model_state", "model_state_dict",
                                         "state", "target"};
    out->size = 0;
    bool front = true;
    for (size_t at = 0; at < size;) {
        size_t end = at;
        while (end < size && name[end] != '.' && name[end] != '/') {
            end++;
        }
        bool last = end == size;
        bool wrapper = is_one_of(name + at, end - at, wrappers, sizeof(wrappers) / sizeof(wrappers[0]));
        bool model = front && is_one_of(name + at, end - at, models, sizeof(models) / sizeof(models[0]));
        bool left_out = !last && ((way >= UNWRAPPED && wrapper) || (way >= WITHOUT_MODEL && model));
        if (!left_out) {
            front = false;
            memcpy(out->bytes + out->size, name + at, end - at);
            out->size += end - at;
            out->bytes[out->size++] = '.';
        }
        at = end + 1;
    }
}

static int by_hash(const void *left, const void *right) {
    const name_key *a = left, *b = right;
    if (a->hash != b->hash) {
        return a->hash < b->hash ? -1 : 1;
    }
    return a->tensor < b->tensor ? -1 : a->tensor > b->tensor;
}

/* The part of a tensor's name that is compared; for a weight, the whole name. */
static const char *parameter_of(const roles *r, size_t tensor, size_t *size) {
    role_name parsed;
    const char *name = r->tensors[tensor].name;
    role_name_read(&parsed, name, strlen(name));
    if (parsed.slot == SLOT_NONE) {
        *size = strlen(name);
        return name;
    }
    return role_name_parameter(&parsed, name, parsed.likely, size);
}

static bool shapes_agree(const ckd_tensor_name *a, const ckd_tensor_name *b) {
    return a->ndim == b->ndim &&
           (a->ndim == 0 || memcmp(a->shape, b->shape, a->ndim * sizeof(a->shape[0])) == 0);
}

/* Finds the only tensor with this name and shape; NOBODY: none, or several, or too many to tell. */
static size_t look_up(const roles *r, const name_table *table, const text *sought, int way, size_t asking) {
    uint64_t hash = hash64(sought->bytes, sought->size);
    size_t low = 0, high = table->count, found = NOBODY;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (table->keys[middle].hash < hash) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    for (size_t end = low + ALIKE_MAX; low < table->count && table->keys[low].hash == hash; low++) {
        if (low == end) {
            return NOBODY;
        }
        size_t tensor = table->keys[low].tensor, size;
        text other;
        const char *part = parameter_of(r, tensor, &size);
        as_compared(&other, part, size, way);
        bool same = other.size == sought->size && memcmp(other.bytes, sought->bytes, other.size) == 0;
        if (!same || tensor == asking || !shapes_agree(&r->tensors[tensor], &r->tensors[asking])) {
            continue;
        }
        if (found != NOBODY && strcmp(r->tensors[found].name, r->tensors[tensor].name) != 0) {
            return NOBODY;
        }
        found = found == NOBODY ? tensor : found; /* else another region of the same tensor */
    }
    return found;
}

static bool is_listed(const roles *r, size_t i, ckd_role role) {
    bool repeated = i > 0 && strcmp(r->tensors[i].name, r->tensors[i - 1].name) == 0;
    return r->out[i].role == role && !repeated;
}

static ckd_status fill_table(name_table *table, const roles *r, int way, ckd_role role, ckd_error *err) {
    size_t count = 0;
    for (size_t i = 0; i < r->count; i++) {
        count += is_listed(r, i, role);
    }
    table->keys = malloc((count + 1) * sizeof(*table->keys));
    if (!table->keys) {
        return err_nomem(err, count * sizeof(*table->keys), "names of tensors");
    }
    for (size_t i = 0; i < r->count; i++) {
        if (is_listed(r, i, role)) {
            size_t size;
            text key;
            const char *part = parameter_of(r, i, &size);
            as_compared(&key, part, size, way);
            table->keys[table->count++] = (name_key){hash64(key.bytes, key.size), i};
        }
    }
    qsort(table->keys, table->count, sizeof(*table->keys), by_hash);
    return CKD_OK;
}

/* ---- finding the weight ---- */

static size_t find_part(const roles *r, const name_table tables[WAYS], int way, size_t asking,
                        const char *part, size_t size) {
    text sought;
    if (size == 0) {
        return NOBODY;
    }
    as_compared(&sought, part, size, way);
    return look_up(r, &tables[way], &sought, way, asking);
}

/* Tries longer names first: state.0.weight may belong to "0.weight" or to "weight". */
static size_t find_named(const roles *r, const name_table tables[WAYS], size_t asking,
                         const role_name *parsed) {
    const char *name = r->tensors[asking].name;
    size_t found = NOBODY;
    for (int way = 0; way < WAYS && found == NOBODY; way++) {
        for (uint32_t from = parsed->first; from <= parsed->latest && found == NOBODY; from++) {
            size_t size;
            const char *part = role_name_parameter(parsed, name, from, &size);
            found = find_part(r, tables, way, asking, part, size);
        }
    }
    return found;
}

/*
 * For a role that the caller set on a name without a slot. Tries all endings of the name, with and without the last
 * component.
 */
static size_t find_beside(const roles *r, const name_table tables[WAYS], size_t asking,
                          const role_name *parsed) {
    const char *name = r->tensors[asking].name;
    size_t found = NOBODY;
    for (int way = 0; way < WAYS && found == NOBODY; way++) {
        role_name whole = *parsed;
        for (int at_end = 0; at_end < 2 && found == NOBODY; at_end++) {
            whole.last = parsed->count - (at_end ? 1u : 0u);
            for (uint32_t from = 0; from < whole.last && found == NOBODY; from++) {
                size_t size;
                const char *part = role_name_parameter(&whole, name, from, &size);
                found = find_part(r, tables, way, asking, part, size);
            }
        }
    }
    return found;
}

/* Resolves state.3.exp_avg by a parameter order with the same prefix. */
static size_t find_numbered(const roles *r, const name_table tables[WAYS], size_t asking,
                            const role_name *parsed) {
    const char *name = r->tensors[asking].name;
    size_t found = NOBODY;
    for (size_t i = 0; parsed->by_index && i < r->order_count; i++) {
        const ckd_parameter_order *o = &r->orders[i];
        size_t length = strlen(o->prefix);
        bool same = strncmp(name, o->prefix, length) == 0 && strncmp(name + length, "state.", 6) == 0 &&
                    parsed->at[parsed->last - 1] == length + 6;
        const char *parameter = same && parsed->index < o->count ? o->names[parsed->index] : NULL;
        if (parameter && strlen(parameter) <= CKD_NAME_MAX) {
            for (int way = 0; way < WAYS && found == NOBODY; way++) {
                found = find_part(r, tables, way, asking, parameter, strlen(parameter));
            }
        }
    }
    return found;
}

static size_t find_owner(const roles *r, const name_table tables[WAYS], size_t asking) {
    role_name parsed;
    role_name_read(&parsed, r->tensors[asking].name, strlen(r->tensors[asking].name));
    if (parsed.slot == SLOT_NONE) {
        return find_beside(r, tables, asking, &parsed);
    }
    size_t found = find_named(r, tables, asking, &parsed);
    return found == NOBODY ? find_numbered(r, tables, asking, &parsed) : found;
}

/* ---- all of them ---- */

static bool is_float(ckd_dtype dtype) {
    return dtype >= CKD_F64 && dtype <= CKD_F8_E5M2;
}

/* Tells whether a lossy fidelity could change the values. */
static bool could_be_lossy(const ckd_tensor_name *t) {
    uint64_t elements = 1;
    for (uint32_t d = 0; d < t->ndim; d++) {
        elements *= t->shape[d];
    }
    return elements >= ROLE_MIN && lattice_dtype(t->dtype);
}

static void doubt(roles *r, size_t i) {
    r->out[i] = (ckd_tensor_role){.role = CKD_ROLE_OTHER, .in_doubt = could_be_lossy(&r->tensors[i])};
    r->owners[i] = NOBODY;
}

/* Sets what the name alone decides. Roles that need a weight are decided when all weights are known. */
static ckd_status begin(roles *r, ckd_error *err) {
    for (size_t i = 0; i < r->count; i++) {
        const ckd_tensor_name *t = &r->tensors[i];
        size_t length = t->name ? strnlen(t->name, CKD_NAME_MAX + 1) : 0;
        if (length == 0 || length > CKD_NAME_MAX) {
            return err_set(err, CKD_E_INVALID, "a tensor's name must have 1 to %d bytes", CKD_NAME_MAX);
        }
        role_name parsed;
        role_name_read(&parsed, t->name, length);
        r->owners[i] = NOBODY;
        ckd_role role_of_name =
            parsed.slot == SLOT_NONE && parsed.marked ? CKD_ROLE_OTHER : role_of_slot(parsed.slot);
        r->out[i].role = t->role != CKD_ROLE_AUTO ? t->role
                         : is_float(t->dtype)     ? role_of_name
                                                  : CKD_ROLE_OTHER;
        r->out[i].largest = parsed.slot == SLOT_LARGEST_SECOND && r->out[i].role == CKD_ROLE_EXP_AVG_SQ;
        bool small = parsed.slot == SLOT_SMALL && parsed.sure;
        if (t->role == CKD_ROLE_AUTO && is_float(t->dtype) && role_of_name == CKD_ROLE_OTHER && !small) {
            doubt(r, i);
        }
    }
    return CKD_OK;
}

static bool is_state(ckd_role role) {
    return role == CKD_ROLE_EXP_AVG || role == CKD_ROLE_EXP_AVG_SQ || role == CKD_ROLE_MASTER;
}

/* Matches m.layer.weight beside layer.weight: m may be short for a moment, or be a layer's name. */
static bool may_be_moment(const roles *r, size_t i) {
    role_name parsed;
    const char *name = r->tensors[i].name;
    role_name_read(&parsed, name, strlen(name));
    for (int at_end = 0; at_end < 2 && parsed.count > 1; at_end++) {
        uint32_t at = at_end ? parsed.count - 1 : 0;
        bool letter = parsed.at[at + 1] - parsed.at[at] == 2 && strchr("mv", name[parsed.at[at]]);
        role_name rest = parsed;
        rest.last = at_end ? parsed.count - 1 : parsed.count;
        size_t size;
        const char *part = role_name_parameter(&rest, name, at_end ? 0 : 1, &size);
        for (int way = 0; letter && way < WAYS; way++) {
            if (find_part(r, r->weights, way, i, part, size) != NOBODY) {
                return true;
            }
        }
    }
    return false;
}

static void pair(roles *r) {
    for (size_t i = 0; i < r->count; i++) {
        if (is_state(r->out[i].role)) {
            r->owners[i] = find_owner(r, r->weights, i);
        } else if (r->out[i].role == CKD_ROLE_WEIGHT && r->tensors[i].role == CKD_ROLE_AUTO &&
                   may_be_moment(r, i)) {
            doubt(r, i);
        }
    }
    for (size_t i = 0; i < r->count; i++) {
        bool moment = is_state(r->out[i].role) && r->out[i].role != CKD_ROLE_MASTER;
        if (moment && r->owners[i] == NOBODY) {
            size_t master = find_owner(r, r->masters, i);
            if (master != NOBODY) {
                r->owners[master] = r->owners[master] == NOBODY ? master : r->owners[master];
                r->owners[i] = r->owners[master];
            }
        }
    }
}

/* Gives all regions of a master without a weight the owner of its first region. */
static void join_regions(roles *r) {
    for (size_t i = 0; i < r->count; i++) {
        if (r->out[i].role == CKD_ROLE_MASTER && r->owners[i] == NOBODY) {
            size_t size;
            const char *part = parameter_of(r, i, &size);
            size_t first = find_part(r, r->masters, AS_IT_IS, i, part, size);
            bool same = first != NOBODY && strcmp(r->tensors[first].name, r->tensors[i].name) == 0;
            r->owners[i] = same ? r->owners[first] : NOBODY;
        }
    }
}

/* ---- two tensors that claim one slot ---- */

typedef struct claim {
    size_t owner, tensor;
    const char *name;
    int slot;
} claim;

static int by_claim(const void *left, const void *right) {
    const claim *a = left, *b = right;
    if (a->owner != b->owner) {
        return a->owner < b->owner ? -1 : 1;
    }
    return a->slot != b->slot ? (a->slot < b->slot ? -1 : 1) : strcmp(a->name, b->name);
}

static ckd_status resolve_claims(roles *r, ckd_error *err) {
    claim *claims = malloc((r->count ? r->count : 1) * sizeof(*claims));
    if (!claims) {
        return err_nomem(err, r->count * sizeof(*claims), "names of tensors");
    }
    size_t count = 0;
    for (size_t i = 0; i < r->count; i++) {
        if (is_state(r->out[i].role) && r->owners[i] != NOBODY) {
            int slot = (int)r->out[i].role * 2 + (r->out[i].largest ? 1 : 0);
            claims[count++] = (claim){r->owners[i], i, r->tensors[i].name, slot};
        }
    }
    qsort(claims, count, sizeof(*claims), by_claim);
    for (size_t i = 0, end; i < count; i = end) {
        bool several = false;
        for (end = i + 1;
             end < count && claims[end].owner == claims[i].owner && claims[end].slot == claims[i].slot;
             end++) {
            several = several || strcmp(claims[end].name, claims[i].name) != 0;
        }
        for (size_t k = i; several && k < end; k++) {
            if (r->tensors[claims[k].tensor].role == CKD_ROLE_AUTO) {
                doubt(r, claims[k].tensor);
            }
        }
    }
    free(claims);
    return CKD_OK;
}

static void finish(roles *r) {
    for (size_t i = 0; i < r->count; i++) {
        if (is_state(r->out[i].role) && r->owners[i] == NOBODY && r->tensors[i].role == CKD_ROLE_AUTO) {
            doubt(r, i);
        }
        r->out[i].weight = r->owners[i] == NOBODY ? NULL : r->tensors[r->owners[i]].name;
    }
}

static void release(roles *r) {
    for (int way = 0; way < WAYS; way++) {
        free(r->weights[way].keys);
        free(r->masters[way].keys);
    }
    free(r->owners);
}

ckd_status ckd_roles_find(ckd_tensor_role *out, const ckd_tensor_name *tensors, size_t count,
                          const ckd_parameter_order *orders, size_t order_count, ckd_error *err) {
    roles r = {.out = out, .tensors = tensors, .count = count, .orders = orders, .order_count = order_count};
    memset(out, 0, count * sizeof(*out));
    r.owners = malloc((count ? count : 1) * sizeof(*r.owners));
    ckd_status status =
        r.owners ? begin(&r, err) : err_nomem(err, count * sizeof(*r.owners), "roles of tensors");
    for (int way = 0; way < WAYS && status == CKD_OK; way++) {
        status = fill_table(&r.weights[way], &r, way, CKD_ROLE_WEIGHT, err);
        THEN(status, fill_table(&r.masters[way], &r, way, CKD_ROLE_MASTER, err));
    }
    if (status == CKD_OK) {
        pair(&r);
        join_regions(&r);
        status = resolve_claims(&r, err);
    }
    if (status == CKD_OK) {
        finish(&r);
    } else {
        memset(out, 0, count * sizeof(*out));
    }
    release(&r);
    return status;
}
