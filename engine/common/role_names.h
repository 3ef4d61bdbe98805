/*
 * Derives a tensor's role from its name. Knows the names that optimizers and checkpoint writers give to a parameter's
 * state, as prefix, suffix or path component. docs/cli.md lists them. Internal to engine/.
 */
#ifndef ENGINE_ROLE_NAMES_H
#define ENGINE_ROLE_NAMES_H

#include <stdbool.h>

#include "include/ckptdelta.h"

typedef enum name_slot {
    SLOT_NONE = 0,       /* no state of a parameter, judging by the name */
    SLOT_FIRST,          /* first moment, or momentum */
    SLOT_SECOND,         /* second moment */
    SLOT_LARGEST_SECOND, /* running maximum of the second moment (AMSGrad) */
    SLOT_MASTER,         /* the parameter in higher precision */
    SLOT_SMALL           /* a counter or a factor: known, and never lossy */
} name_slot;

#define ROLE_MIN        64u  /* elements: smaller tensors are exact in any fidelity (lossy/tile.c) */
#define NAME_COMPONENTS 512u /* maximum: CKD_NAME_MAX bytes, a separator between any two */

typedef struct role_name {
    name_slot slot;
    bool sure;   /* the name alone decides the slot; false: only if a weight matches */
    bool marked; /* the name contains an optimizer's word: without a slot, the role is unknown */
    /*
     * The parameter's name starts at component `first` or later, at most at `latest`, and ends before `last`. How many
     * components to skip depends on all names of the state. `likely` is the best guess. first == last: no parameter
     * name.
     */
    uint32_t first, likely, latest, last;
    bool by_index;  /* the parameter is named by its number in the optimizer's order */
    uint64_t index; /* that number */
    uint32_t count; /* number of components */
    /* start of each component; at[count] is where the next one would start */
    uint16_t at[NAME_COMPONENTS + 1];
} role_name;

/* Parses a name of `size` bytes, at most CKD_NAME_MAX. */
void role_name_read(role_name *out, const char *name, size_t size);
/* The role of a slot's tensors. */
ckd_role role_of_slot(name_slot slot);
/* The parameter's name, *size bytes, if it begins at component `from`. */
const char *role_name_parameter(const role_name *r, const char *name, uint32_t from, size_t *size);
/*
 * The name of the parameter that this tensor belongs to, judging by its name alone; *family_size bytes. For other
 * tensors it is their own name, as that may be a parameter's. NULL: the parameter is known only by its number.
 */
const char *role_name_family(const char *name, size_t size, size_t *family_size);

#endif
