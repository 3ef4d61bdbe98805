/*
 * ckptdelta, the roles of tensors, from their names. Part of ckptdelta.h, which includes it; the same conventions hold.
 *
 * Lossy fidelities code weights, first moments and second moments differently. A moment coded as a weight ruins the
 * optimizer, so roles are never guessed. A tensor that looks like optimizer state but has no known parameter gets the
 * role OTHER and stays exact.
 *
 * ckd_role_of looks at one name. It defines CKD_ROLE_AUTO for ckd_save_tensor and ckd_plan_describe. ckd_roles_find
 * looks at all tensors of a checkpoint together, and so finds the weight of each moment, whatever it is called:
 *
 *     ckd_roles_find(found, tensors, count, NULL, 0, &err);
 *     for each tensor: tensor.role = found[i].role, tensor.weight = found[i].weight;
 *
 * A session without ranks does this by itself at the first step. The store's on_message names the tensors that a lossy
 * save keeps exact because their role is in doubt, and ckd_save_in_doubt counts them. A role set by the caller is never
 * in doubt.
 */
#ifndef CKPTDELTA_ROLES_H
#define CKPTDELTA_ROLES_H

#include "ckptdelta.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Returns the role of a tensor from its name and dtype alone. exp_avg.X, X.exp_avg, optimizer.state.X.exp_avg,
 * optimizer.state.exp_avg.X and the like have the role that they name. Other floating-point tensors are OTHER if they
 * look like optimizer state, or have a number in place of a parameter; the rest are weights.
 */
CKD_API ckd_role ckd_role_of(const char *tensor_name, ckd_dtype dtype);

typedef struct ckd_tensor_role {
    ckd_role role;      /* never AUTO */
    const char *weight; /* its weight, one of the names passed in; NULL: not known */
    int largest;        /* AMSGrad's running maximum of an exp_avg_sq, beside the current one */
    /*
     * The tensor looks like optimizer state, but no weight of its shape was found, or another tensor claims the same
     * place. Its role is OTHER. Set only for tensors that a lossy fidelity would not keep exact anyway.
     */
    int in_doubt;
} ckd_tensor_role;

/* The properties that determine a role. */
typedef struct ckd_tensor_name {
    const char *name;
    ckd_role role; /* kept unless AUTO */
    ckd_dtype dtype;
    uint32_t ndim;
    const uint64_t *shape; /* may be NULL if ndim is 0 */
} ckd_tensor_name;

/* The parameters of one optimizer in its order, for states named by number (state.0.exp_avg). */
typedef struct ckd_parameter_order {
    const char *prefix;       /* the text before "state.", such as "optimizer." or "" */
    const char *const *names; /* of the parameters; NULL: that one is not known */
    size_t count;
} ckd_parameter_order;

/*
 * Finds the roles of all tensors of a checkpoint. A name may occur several times, for regions of a tensor. A moment
 * belongs to the weight that its name contains, or that its number has in `orders` (may be NULL). Either name may be
 * wrapped: "module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", or "model." at the front.
 * If there is no such weight, it belongs to a matching master. Errors: INVALID (a name), NOMEM.
 */
CKD_API ckd_status ckd_roles_find(ckd_tensor_role *out, const ckd_tensor_name *tensors, size_t count,
                                  const ckd_parameter_order *orders, size_t order_count, ckd_error *err);

/*
 * Returns how many tensors or regions this lossy save has stored exactly so far because their role is in doubt. These
 * have the role AUTO and a name that looks like optimizer state but contains no weight. Call it before the save ends.
 */
CKD_API uint64_t ckd_save_in_doubt(const ckd_save *save);

#ifdef __cplusplus
}
#endif

#endif
