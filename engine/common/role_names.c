/*
 * A name is cut at dots and slashes. A slot is a component that says which state of a parameter the tensor is. It
 * follows the parameter's name (PyTorch, DCP, FSDP, DeepSpeed), or precedes it (Megatron, Optax, ckptdelta itself).
 * Containers precede both.
 *
 *   optimizer.state.layers.0.weight.exp_avg        containers, parameter, slot
 *   optimizer.state.exp_avg.layers.0.weight        containers, slot, parameter
 *   exp_avg.layers.0.weight                        slot, parameter
 */
#include "engine/common/common.h"

#include <string.h>

static const struct {
    const char *name;
    name_slot slot;
    bool strong; /* a slot even without containers */
} slots[] = {
    {"exp_avg", SLOT_FIRST, true},
    {"momentum_buffer", SLOT_FIRST, true},
    {"mu", SLOT_FIRST, false},
    {"trace", SLOT_FIRST, false},
    {"exp_avg_sq", SLOT_SECOND, true},
    {"square_avg", SLOT_SECOND, true},
    {"nu", SLOT_SECOND, false},
    {"max_exp_avg_sq", SLOT_LARGEST_SECOND, true},
    {"nu_max", SLOT_LARGEST_SECOND, false},
    {"fp32", SLOT_MASTER, true},
    {"fp32_param", SLOT_MASTER, true},
    {"master_param", SLOT_MASTER, true},
    {"master_weight", SLOT_MASTER, true},
    {"master", SLOT_MASTER, false},
    {"step", SLOT_SMALL, false},
    {"count", SLOT_SMALL, false},
    {"mu_product", SLOT_SMALL, false},
    {"eta", SLOT_SMALL, false},
    {"RMS", SLOT_SMALL, false},
    {"exp_avg_sq_row", SLOT_SMALL, true},
    {"exp_avg_sq_col", SLOT_SMALL, true},
    {"row_var", SLOT_SMALL, true},
    {"col_var", SLOT_SMALL, true},
    {"variance", SLOT_SMALL, false},
    {"v_row", SLOT_SMALL, false},
    {"v_col", SLOT_SMALL, false},
};
#define SLOT_NAMES (sizeof(slots) / sizeof(slots[0]))

typedef struct component {
    const char *text;
    size_t size;
} component;

static component component_at(const role_name *r, const char *name, uint32_t i) {
    return (component){name + r->at[i], (size_t)(r->at[i + 1] - r->at[i]) - 1};
}

static bool is(component c, const char *text) {
    return strlen(text) == c.size && memcmp(c.text, text, c.size) == 0;
}

static bool begins(component c, const char *text) {
    size_t length = strlen(text);
    return c.size >= length && memcmp(c.text, text, length) == 0;
}

static bool ends(component c, const char *text) {
    size_t length = strlen(text);
    return c.size >= length && memcmp(c.text + c.size - length, text, length) == 0;
}

static bool contains(component c, const char *text) {
    return memmem(c.text, c.size, text, strlen(text)) != NULL;
}

static bool is_number(component c) {
    for (size_t i = 0; i < c.size; i++) {
        if (c.text[i] < '0' || c.text[i] > '9') {
            return false;
        }
    }
    return c.size > 0 && c.size < 10;
}

static bool is_among(component c, const char *const *names, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (is(c, names[i])) {
            return true;
        }
    }
    return false;
}

/* Tells whether a component names an optimizer, or its whole state. */
static bool is_optimizer(component c) {
    static const char *const names[] = {"optim", "opt", "osd", "param_states"};
    return is_among(c, names, sizeof(names) / sizeof(names[0])) || contains(c, "optimizer") ||
           begins(c, "optim_") || begins(c, "opt_state") || ends(c, "_opt_state") || begins(c, "chained_");
}

/* Components between the optimizer's name and the parameter's. */
static bool is_container(component c) {
    static const char *const names[] = {"state",       "states",       "zero",
                                        "inner_state", "inner_states", "train_state"};
    return is_optimizer(c) || is_among(c, names, sizeof(names) / sizeof(names[0]));
}

/* Components that never occur in a weight's name. */
static bool is_mark(component c) {
    static const char *const names[] = {"mu",     "nu",         "optim",       "variance",
                                        "master", "main_param", "param_groups"};
    return (is_optimizer(c) && !is(c, "opt")) || is_among(c, names, sizeof(names) / sizeof(names[0])) ||
           contains(c, "exp_avg") || contains(c, "fp32") || begins(c, "momentum") || begins(c, "master_") ||
           begins(c, "square_avg") || begins(c, "main_param") || begins(c, "adam") || begins(c, "Adam") ||
           ends(c, "_sq");
}

ckd_role role_of_slot(name_slot slot) {
    static const ckd_role roles[] = {[SLOT_FIRST] = CKD_ROLE_EXP_AVG,
                                     [SLOT_SECOND] = CKD_ROLE_EXP_AVG_SQ,
                                     [SLOT_LARGEST_SECOND] = CKD_ROLE_EXP_AVG_SQ,
                                     [SLOT_MASTER] = CKD_ROLE_MASTER,
                                     [SLOT_SMALL] = CKD_ROLE_OTHER};
    return slot == SLOT_NONE ? CKD_ROLE_WEIGHT : roles[slot];
}

static void cut(role_name *r, const char *name, size_t size) {
    r->at[0] = 0;
    for (size_t i = 0; i <= size; i++) {
        bool end = i == size || name[i] == '.' || name[i] == '/';
        if (end && r->count < NAME_COMPONENTS) {
            r->at[++r->count] = (uint16_t)(i + 1);
        }
    }
    /* The universal format of DeepSpeed: layers.0.weight/exp_avg.pt */
    if (r->count > 2 && is(component_at(r, name, r->count - 1), "pt")) {
        r->count--;
    }
}

static size_t slot_number(component c) {
    size_t i = 0;
    while (i < SLOT_NAMES && !is(c, slots[i].name)) {
        i++;
    }
    return i;
}

/* Counts the leading components that can be containers. Numbers count after the first. */
static uint32_t containers(const role_name *r, const char *name) {
    uint32_t n = 0;
    while (n < r->count &&
           (is_container(component_at(r, name, n)) || (n > 0 && is_number(component_at(r, name, n))))) {
        n++;
    }
    return n;
}

/* Trailing numbers of the containers begin the parameter's name, except for one that numbers the optimizers. */
static uint32_t likely_begin(const role_name *r, const char *name, uint32_t latest) {
    static const char *const several[] = {"optimizers", "optimizer_states", "opt_state", "opt_states"};
    uint32_t from = latest;
    while (from > 1 && is_number(component_at(r, name, from - 1))) {
        from--;
    }
    bool one_of = from < latest &&
                  is_among(component_at(r, name, from - 1), several, sizeof(several) / sizeof(several[0]));
    return from + one_of;
}

/* Matches state.0.exp_avg, but not state.params.layer.weight. */
static bool is_bare_state(const role_name *r, const char *name) {
    static const char *const models[] = {"params", "model", "module", "state_dict", "model_state"};
    component first = component_at(r, name, 0);
    return r->count > 2 && (is(first, "state") || is(first, "states")) &&
           !is_among(component_at(r, name, 1), models, sizeof(models) / sizeof(models[0]));
}

static bool has_optimizer(const role_name *r, const char *name, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        if (is_optimizer(component_at(r, name, i))) {
            return true;
        }
    }
    return count > 0 && is_bare_state(r, name);
}

static void take_slot(role_name *r, size_t number, bool in_optimizer) {
    r->slot = slots[number].slot;
    r->sure = slots[number].strong || in_optimizer;
}

/* containers, slot, parameter */
static bool read_prefix(role_name *r, const char *name, uint32_t front) {
    size_t number = front + 1 < r->count ? slot_number(component_at(r, name, front)) : SLOT_NAMES;
    if (number == SLOT_NAMES) {
        return false;
    }
    take_slot(r, number, has_optimizer(r, name, front) || (front == 0 && slots[number].slot == SLOT_MASTER));
    r->first = r->likely = r->latest = front + 1;
    r->last = r->count;
    return true;
}

/* containers, parameter, slot */
static bool read_suffix(role_name *r, const char *name, uint32_t front) {
    size_t number = r->count > 1 ? slot_number(component_at(r, name, r->count - 1)) : SLOT_NAMES;
    if (number == SLOT_NAMES) {
        return false;
    }
    take_slot(r, number, has_optimizer(r, name, front));
    r->last = r->count - 1;
    r->latest = front < r->last ? front : r->last - 1;
    r->likely = likely_begin(r, name, r->latest);
    component only = component_at(r, name, r->last - 1);
    if (r->latest + 1 == r->last && is_number(only) && r->last > 1) {
        r->by_index = true;
        for (size_t i = 0; i < only.size; i++) {
            r->index = 10 * r->index + (uint64_t)(only.text[i] - '0');
        }
    }
    return true;
}

void role_name_read(role_name *out, const char *name, size_t size) {
    memset(out, 0, offsetof(role_name, at));
    cut(out, name, size);
    for (uint32_t i = 0; i < out->count && !out->marked; i++) {
        out->marked = is_mark(component_at(out, name, i));
    }
    out->marked = out->marked || is_bare_state(out, name);
    uint32_t front = containers(out, name);
    bool has_slot = read_prefix(out, name, front) || read_suffix(out, name, front);
    if (has_slot && !out->sure && !out->marked) {
        out->slot = SLOT_NONE; /* a weight that happens to have this name */
    }
    out->marked = out->marked || out->slot != SLOT_NONE;
}

const char *role_name_parameter(const role_name *r, const char *name, uint32_t from, size_t *size) {
    *size = from < r->last ? (size_t)(r->at[r->last] - r->at[from]) - 1 : 0;
    return name + r->at[from];
}

const char *role_name_family(const char *name, size_t size, size_t *family_size) {
    role_name r;
    role_name_read(&r, name, size);
    if (r.slot == SLOT_NONE || !r.sure) {
        *family_size = size;
        return name;
    }
    return r.by_index ? NULL : role_name_parameter(&r, name, r.likely, family_size);
}

ckd_role ckd_role_of(const char *tensor_name, ckd_dtype dtype) {
    if (dtype < CKD_F64 || dtype > CKD_F8_E5M2) {
        return CKD_ROLE_OTHER;
    }
    if (!tensor_name) {
        return CKD_ROLE_WEIGHT;
    }
    role_name r;
    role_name_read(&r, tensor_name, strnlen(tensor_name, CKD_NAME_MAX));
    if (r.slot != SLOT_NONE && r.sure && !r.by_index) {
        return role_of_slot(r.slot);
    }
    return r.marked ? CKD_ROLE_OTHER : CKD_ROLE_WEIGHT;
}
