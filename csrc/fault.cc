#include "fault.h"

#ifdef TCXL_FAULTS
namespace tcxl::internal {
Fault planted_fault = Fault::kNone;
}
#endif
