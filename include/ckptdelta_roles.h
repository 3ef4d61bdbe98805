/*
 * ckptdelta, the roles of tensors by their names. Part of ckptdelta.h, which includes it; the same conventions hold.
 *
 * Lossy fidelities code a weight, a first moment and a second moment in three ways, and a moment that is coded as a weight ruins the optimizer.
 * So a role is never guessed: a tensor that looks like an optimizer's, and whose parameter nobody knows, has the role OTHER and stays exact.
 *
 * ckd_role_of looks at one name, and is what CKD_ROLE_AUTO means to ckd_save_tensor and to ckd_plan_describe. ckd_roles_find looks at all tensors
 * of a checkpoint together, and so knows which weight each moment belongs to, whatever it is called:
 *
 *     ckd_roles_find(found, tensors, count, NULL, 0, &err);
 *     for each tensor: tensor.role = found[i].role, tensor.weight = found[i].weight;
 *
 * A session without ranks does that by itself at the first step. Which tensors a lossy save keeps exact because they are in doubt, is told to the store's
 * on_message, and ckd_save_in_doubt counts them. A role that is given is never in doubt.
 */
#ifndef CKPTDELTA_ROLES_H
#define CKPTDELTA_ROLES_H

#include "ckptdelta.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * The role of a tensor by its name and dtype alone: exp_avg.X, X.exp_avg, optimizer.state.X.exp_avg, optimizer.state.exp_avg.X and their like have
 * the role that they say. Of other floats, what looks like an optimizer's is OTHER, as is a state with a number for its parameter, and the rest are weights.
 */
CKD_API ckd_role ckd_role_of(const char *tensor_name, ckd_dtype dtype);

typedef struct ckd_tensor_role {
    ckd_role role; /* never AUTO */
    const char
        *weight; /* the name of the tensor that it belongs to, one of those given; NULL: none is known */
    int largest; /* an exp_avg_sq that is AMSGrad's: the largest so far, beside the one of now */
    /*
     * It looks like an optimizer's, and no weight of its shape was found, or another tensor claims the same place: its role is OTHER. Only of tensors that
     * a lossy fidelity would not have kept exact anyway.
     */
    int in_doubt;
} ckd_tensor_role;

/* What a role follows from. */
typedef struct ckd_tensor_name {
    const char *name;
    ckd_role role; /* not AUTO: it is kept */
    ckd_dtype dtype;
    uint32_t ndim;
    const uint64_t *shape; /* may be NULL if ndim is 0 */
} ckd_tensor_name;

/* The parameters of one optimizer in its order, for states that are named by number (state.0.exp_avg). */
typedef struct ckd_parameter_order {
    const char *prefix;       /* what stands before "state.": "optimizer.", or "" */
    const char *const *names; /* of the parameters; NULL among them: not known */
    size_t count;
} ckd_parameter_order;

/*
 * The roles of all tensors of a checkpoint. A name may be given several times, for regions of a tensor. A moment belongs to the weight that its name has in it, also if one of both is wrapped ("module.", "_orig_mod.",
 * "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", or "model." at the front), or that has its number in `orders` (may be NULL). Without
 * such a weight, to the master that does. Errors: INVALID (a name), NOMEM.
 */
CKD_API ckd_status ckd_roles_find(ckd_tensor_role *out, const ckd_tensor_name *tensors, size_t count,
                                  const ckd_parameter_order *orders, size_t order_count, ckd_error *err);

/*
 * How many tensors, or regions of them, this lossy save has stored exactly so far because their role is in doubt: AUTO, a name that looks like an
 * optimizer's, and no weight in it. To be asked before the save ends.
 */
CKD_API uint64_t ckd_save_in_doubt(const ckd_save *save);

#ifdef __cplusplus
}
#endif

#endif
