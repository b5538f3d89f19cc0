// Lets torch without CUDA choose a device `cuda`: nothing is computed there, FakeTensorMode only asks for the device.
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
