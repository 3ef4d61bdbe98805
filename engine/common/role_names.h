/*
 * What a tensor's name says of its role: the names that optimizers and those who save them give to a parameter's state, as prefix, suffix or
 * component of a path. docs/cli.md lists them. Internal to engine/.
 */
#ifndef ENGINE_ROLE_NAMES_H
#define ENGINE_ROLE_NAMES_H

#include <stdbool.h>

#include "include/ckptdelta.h"

typedef enum name_slot {
    SLOT_NONE = 0,       /* no state of a parameter, as far as the name tells */
    SLOT_FIRST,          /* first moment, or momentum */
    SLOT_SECOND,         /* second moment */
    SLOT_LARGEST_SECOND, /* the largest that the second moment has been (AMSGrad) */
    SLOT_MASTER,         /* the parameter itself, in higher precision */
    SLOT_SMALL           /* a counter or a factor: known, and never lossy */
} name_slot;

#define ROLE_MIN        64u  /* elements: tensors of less are exact in any fidelity (lossy/tile.c) */
#define NAME_COMPONENTS 512u /* at most: CKD_NAME_MAX bytes and a separator between any two */

typedef struct role_name {
    name_slot slot;
    bool sure;   /* the slot follows from the name alone; if not, it takes a weight that it belongs to */
    bool marked; /* something in the name is an optimizer's: without a slot, nobody knows what this is */
    /*
     * The parameter's name is the components first ... last - 1 without some at their front, of which only whoever knows all names can tell
     * how many: from `first`, at most to `latest`. `likely` is the best guess. None: first is last.
     */
    uint32_t first, likely, latest, last;
    bool by_index;  /* that name is a number: the parameter's, in the order of the optimizer */
    uint64_t index; /* if so */
    uint32_t count; /* of components */
    uint16_t at[NAME_COMPONENTS + 1]; /* where each begins; then where the next one would */
} role_name;

/* Reads a name of `size` bytes, at most CKD_NAME_MAX. */
void role_name_read(role_name *out, const char *name, size_t size);
/* The role that a slot has. */
ckd_role role_of_slot(name_slot slot);
/* The parameter's name, as long as *size, if it begins with component `from`. */
const char *role_name_parameter(const role_name *r, const char *name, uint32_t from, size_t *size);
/*
 * The parameter that a name by itself says the tensor belongs to, as long as *family_size; of any other tensor its own name, which may be
 * somebody's parameter. NULL: its parameter has a number only.
 */
const char *role_name_family(const char *name, size_t size, size_t *family_size);

#endif
